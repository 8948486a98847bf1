"""How many cores a computation of the server uses."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def all_cores() -> Iterator[None]:
    """For what is large enough for all cores, unlike a tile: a model that reads or writes, a whole map."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads, os.cpu_count() or 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
