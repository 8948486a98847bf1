"""Waiting for other processes."""

import os
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(true: Callable[[], object], seconds: float = 300.0) -> None:
    """Counted in naps, not by the clock: on a busy machine the tests may be halted as long as they like."""
    for _ in range(int(seconds / 0.02)):
        if true():
            return
        time.sleep(0.02)
    raise AssertionError("it has not come about")


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
