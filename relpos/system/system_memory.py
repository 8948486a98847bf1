"""The peak memory of this process and the memory of this machine, in the way of each system."""

import contextlib
import os
import re
import sys
from pathlib import Path

if sys.platform == "win32":
    import ctypes

    class _Counters(ctypes.Structure):
        """PROCESS_MEMORY_COUNTERS of psapi.h."""

        _fields_ = [
            ("cb", ctypes.c_uint32),
            ("PageFaultCount", ctypes.c_uint32),
            ("PeakWorkingSetSize", ctypes.c_size_t),
            ("WorkingSetSize", ctypes.c_size_t),
            ("QuotaPeakPagedPoolUsage", ctypes.c_size_t),
            ("QuotaPagedPoolUsage", ctypes.c_size_t),
            ("QuotaPeakNonPagedPoolUsage", ctypes.c_size_t),
            ("QuotaNonPagedPoolUsage", ctypes.c_size_t),
            ("PagefileUsage", ctypes.c_size_t),
            ("PeakPagefileUsage", ctypes.c_size_t),
        ]

    class _Machine(ctypes.Structure):
        """MEMORYSTATUSEX of sysinfoapi.h."""

        _fields_ = [
            ("dwLength", ctypes.c_uint32),
            ("dwMemoryLoad", ctypes.c_uint32),
            ("ullTotalPhys", ctypes.c_uint64),
            ("rest", ctypes.c_uint64 * 6),
        ]

    def memory_of_machine() -> int:
        """The memory of this machine in bytes."""
        status = _Machine(dwLength=ctypes.sizeof(_Machine))
        if not ctypes.WinDLL("kernel32", use_last_error=True).GlobalMemoryStatusEx(ctypes.byref(status)):
            raise ctypes.WinError(ctypes.get_last_error())
        return int(status.ullTotalPhys)

    def peak_of_process() -> int:
        """The peak of the resident memory of this process in bytes, since it started."""
        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel.GetCurrentProcess.restype = ctypes.c_void_p
        read = kernel.K32GetProcessMemoryInfo
        read.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Counters), ctypes.c_uint32)
        counters = _Counters(cb=ctypes.sizeof(_Counters))
        if not read(kernel.GetCurrentProcess(), ctypes.byref(counters), counters.cb):
            raise ctypes.WinError(ctypes.get_last_error())
        return int(counters.PeakWorkingSetSize)

else:
    import resource

    def memory_of_machine() -> int:
        """The memory of this machine in bytes."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def peak_of_process() -> int:
        """The peak of the resident memory of this process in bytes, since it started or the peak was reset."""
        status = Path("/proc/self/status")
        if status.exists():  # Linux: a peak that can be reset
            high_water_mark = re.search(r"VmHWM:\s*(\d+) kB", status.read_text(encoding="ascii"))
            if high_water_mark:
                return 1024 * int(high_water_mark[1])
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others kilobytes
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory_limit() -> int:
    """The memory in bytes that this process may use: that of the machine, or less in a container with a limit."""
    limits = [memory_of_machine()]
    for file in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int(file.read_text(encoding="ascii")))
    return min(limits)


def check_memory(what: str, size: int, advice: str) -> None:
    """Refuse what cannot fit into memory before it is allocated: the system would end the process without a word.

    Args:
        what: What needs the memory, with the numbers that its size comes from.
        size: Bytes that are needed, at least.
        advice: What to do instead.

    Raises:
        ValueError: The memory of this machine is less.
    """
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
