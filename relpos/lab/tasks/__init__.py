"""Synthetic tasks of retrieval, copying and counting, scored exactly: one file a task."""

from relpos.lab.tasks.registry import names, task
from relpos.lab.tasks.task import Example, Task

__all__ = ["Example", "Task", "names", "task"]
