"""Freed memory that the C library keeps for itself."""

import contextlib
import ctypes
from collections.abc import Callable
from functools import cache

import torch

M_ARENA_MAX = -8  # of glibc's malloc.h


def give_back_freed_memory() -> None:
    """Return freed memory to the system, where the C library would keep it.

    Before version 2.38, glibc hardly reuses freed memory that was aligned, as torch's is. Without this call, many
    blocks let the process grow by several gigabytes although little memory is in use.
    """
    if torch.compiler.is_compiling():
        return
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


def limit_arenas(number: int) -> None:
    """Let the threads of this process share a few of the C library's pools of memory.

    glibc gives each new thread a pool of its own, which keeps what the thread has freed. Call this before the threads
    are started.

    Args:
        number: Of pools.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not glibc
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, number)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        function: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc
        return None
    return function
