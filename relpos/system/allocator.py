"""Freed memory that the C library keeps for itself."""

import ctypes
from collections.abc import Callable
from functools import cache

import torch


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


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        function: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc
        return None
    return function
