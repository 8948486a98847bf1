"""All tasks by name. To add one, write its file and add its line to `FILES`. Imports nothing slower than numpy."""

import functools
import importlib

from relpos.system.errors import unknown
from relpos.tasks.task import Task

FILES = {  # name: file and class
    "copy": ("copy", "Copy"),
    "count": ("count", "Count"),
    "flip_flop": ("flip_flop", "FlipFlop"),
    "passkey": ("passkey", "Passkey"),
    "recall": ("recall", "Recall"),
    "selective_copy": ("copy", "SelectiveCopy"),
}


def names() -> list[str]:
    """The names of all tasks, sorted."""
    return sorted(FILES)


@functools.cache
def task(name: str) -> Task:
    """A task by name.

    Raises:
        ValueError: The name is unknown.

    Example:
        >>> recall = task("recall")
        >>> print(recall.text(recall.draw(64, seed=0, index=0, portion="heldout")))
    """
    if name not in FILES:
        raise unknown("task", name, names())
    file, class_name = FILES[name]
    module = importlib.import_module(f"relpos.tasks.{file}")
    instance: Task = getattr(module, class_name)(name)
    return instance
