"""Measuring the peak memory of a piece of work."""

import contextlib
from pathlib import Path

import torch

from relpos.system.allocator import give_back_freed_memory
from relpos.system.system_memory import peak_of_process


def begin_peak(device: torch.device) -> None:
    """Start measuring peak memory.

    Args:
        device: On a CUDA device the memory of tensors is measured; otherwise the resident memory of this process.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    give_back_freed_memory()  # what earlier work has freed must not count
    with contextlib.suppress(OSError):  # only Linux can reset the peak; elsewhere it is that since the process started
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak(device: torch.device) -> int:
    """The peak memory in bytes since `begin_peak` was called with the same device."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return peak_of_process()
