"""Synthetic tasks of retrieval, copying and counting with exact answers, by name.

To add one, write its class in a file of this folder and add its line to `FILES`. Imports nothing slower than numpy.
"""

import functools
import importlib

from relpos.system.errors import unknown
from relpos.tasks.task import Example, Task

__all__ = ["Example", "Task", "names", "task"]

FILES = {  # name: file and class
    "copy": ("copying", "Copy"),
    "count": ("state_tracking", "Count"),
    "flip_flop": ("state_tracking", "FlipFlop"),
    "passkey": ("retrieval", "Passkey"),
    "recall": ("retrieval", "Recall"),
    "selective_copy": ("copying", "SelectiveCopy"),
}


def names() -> list[str]:
    """The names of all tasks, sorted."""
    return sorted(FILES)


@functools.cache
def task(name: str) -> Task:
    """A task by name.

    Example:
        >>> recall = task("recall")
        >>> print(recall.text(recall.draw(64, seed=0, index=0, portion="heldout")))
    """
    if name not in FILES:
        raise unknown("task", name, names())
    file, class_name = FILES[name]
    instance: Task = getattr(importlib.import_module(f"relpos.tasks.{file}"), class_name)(name)
    return instance
