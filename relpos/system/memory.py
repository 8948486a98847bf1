"""Memory: how much there is, the peak of a piece of work, and freed memory that the C library keeps.

torch and psutil are imported where they are used: `relpos --help` checks no memory.
"""

import contextlib
import ctypes
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

M_ARENA_MAX = -8  # of glibc's malloc.h
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))

# -- How much there is


def memory_of_machine() -> int:
    """The memory of this machine in bytes."""
    import psutil

    return int(psutil.virtual_memory().total)


def memory_limit() -> int:
    """The memory in bytes that this process may use: that of the machine, or less in a container with a limit."""
    limits = [memory_of_machine()]
    for file in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int(file.read_text(encoding="ascii")))
    return min(limits)


def check_memory(what: str, size: int, advice: str) -> None:
    """Refuse what cannot fit into memory before it is allocated: the system would end the process with no message."""
    limit = memory_limit()
    if size > limit:
        raise ValueError(f"{what} needs {in_words(size)} of memory, and there are {in_words(limit)}: {advice}.")


def out_of_memory(error: BaseException) -> str | None:
    """The sentence for an error of an allocation, by Python, numpy or PyTorch; None for any other error."""
    size = re.search(r"tried to allocate ([0-9]+) bytes", str(error))
    if size is None and not isinstance(error, MemoryError):
        return None
    needed = "" if size is None else f": {in_words(int(size[1]))} were asked for at once"
    return f"memory ran out{needed}, and there are {in_words(memory_limit())}. Give smaller sizes."


def in_words(size: int) -> str:
    """A number of bytes as people write it: 1.5 GB."""
    for power, name in ((60, "EB"), (50, "PB"), (40, "TB"), (30, "GB"), (20, "MB")):
        if size >= 2**power:
            return f"{size / 2**power:,.1f} {name}"
    return f"{size:,} bytes"


# -- The peak of a piece of work


def begin_peak(device: "torch.device") -> None:
    """Start measuring peak memory: on a CUDA device that of tensors, otherwise the resident memory of this process."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return
    give_back_freed_memory()  # what earlier work has freed must not count
    with contextlib.suppress(OSError):  # only Linux can reset the peak; elsewhere it counts from the process's start
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak(device: "torch.device") -> int:
    """The peak memory in bytes since `begin_peak` was called with the same device."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    with contextlib.suppress(OSError):  # Linux: a peak that can be reset, which psutil does not read
        high_water_mark = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
        if high_water_mark:
            return 1024 * int(high_water_mark[1])
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others kilobytes
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# -- Freed memory that the C library keeps


def give_back_freed_memory() -> None:
    """Return freed memory to the system.

    Before version 2.38, glibc hardly reuses freed memory that was aligned, as torch's is. Without this call, many
    blocks let the process grow by several gigabytes although little memory is in use.
    """
    import torch

    trim = None if torch.compiler.is_compiling() else _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def limit_arenas(number: int) -> None:
    """Let threads that are started later share this number of pools of memory.

    glibc gives each new thread a pool of its own, which keeps what the thread has freed.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        mallopt(M_ARENA_MAX, number)


@cache
def _of_glibc(name: str) -> Callable[..., int] | None:
    """A function of the C library; None if that is not glibc."""
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    return function
