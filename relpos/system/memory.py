"""How much memory a piece of work took at most."""

import contextlib
import re
import resource
from pathlib import Path

import torch

from relpos.system.allocator import give_back_freed_memory


def begin_peak(device: torch.device) -> None:
    """Start measuring: of a GPU what tensors take there, else what the process has in memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    give_back_freed_memory()  # of the work before
    with contextlib.suppress(OSError):  # elsewhere than on Linux the peak is that of the process's whole life
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak(device: torch.device) -> int:
    """The most bytes since `begin_peak`."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
        if found:
            return 1024 * int(found[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
