"""Synthetic tasks of retrieval, copying and counting with exact answers: one file per task."""

from relpos.tasks.registry import names, task
from relpos.tasks.task import Example, Task

__all__ = ["Example", "Task", "names", "task"]
