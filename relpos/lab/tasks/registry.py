"""Every task by name. To add one: write its file, add its line to `FILES`. Imports numpy and nothing heavier."""

import functools
import importlib

from relpos.errors import unknown
from relpos.lab.tasks.task import Task

FILES = {  # name: file and class
    "copy": ("copy", "Copy"),
    "count": ("count", "Count"),
    "flip_flop": ("flip_flop", "FlipFlop"),
    "passkey": ("passkey", "Passkey"),
    "recall": ("recall", "Recall"),
    "selective_copy": ("selective_copy", "SelectiveCopy"),
}


def names() -> list[str]:
    """Every task's name, sorted."""
    return sorted(FILES)


@functools.cache
def task(name: str) -> Task:
    """A task by name."""
    if name not in FILES:
        raise unknown("task", name, names())
    file, cls = FILES[name]
    made: Task = getattr(importlib.import_module(f"relpos.lab.tasks.{file}"), cls)(name)
    return made
