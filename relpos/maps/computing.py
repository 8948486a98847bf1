"""How long one computation may take, and how many cores it uses."""

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch

_ends: ContextVar[float | None] = ContextVar("ends", default=None)  # by time.monotonic; None: no limit


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Limit the time of what is computed inside."""
    token = _ends.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _ends.reset(token)


def check_time() -> None:
    """Called in loops over long maps.

    Raises:
        TimeoutError: The time is up.
    """
    ends = _ends.get()
    if ends is not None and time.monotonic() > ends:
        raise TimeoutError("this takes too long to compute: give a smaller length.")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run what is inside on so many of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def all_cores() -> AbstractContextManager[None]:
    """For what is large enough for all cores, unlike a tile: a model that reads or writes, a complete map."""
    return threads(max(torch.get_num_threads(), os.cpu_count() or 1))


def one_thread() -> AbstractContextManager[None]:
    """For many small sums: several threads take up to six times as long on a busy machine."""
    return threads(1)
