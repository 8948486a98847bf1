"""One process a folder: a lock that the system releases when its process dies, however it dies."""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import IO


class HeldError(ValueError):
    """Another process has the lock."""


class Lock:
    """Hold a folder for this process; if another process has it, refuse, or wait for it.

    `name` is the lock's file in the folder: who holds one name does not hold another.
    """

    def __init__(self, folder: Path, name: str = ".lock", wait: bool = False) -> None:
        self.file, self.wait = folder / name, wait
        self.held: IO[str] | None = None

    def __enter__(self) -> "Lock":
        self.file.parent.mkdir(parents=True, exist_ok=True)
        handle = self.file.open("a+", encoding="utf-8")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if self.wait else fcntl.LOCK_NB))
        except BlockingIOError:
            handle.seek(0)
            holder = handle.read().strip() or "another process"
            handle.close()
            raise HeldError(
                f"{self.file.parent} is being trained by {holder}: wait for it, stop it, or choose another --out."
            ) from None
        # A file left by a process that died says who that was; it holds nothing.
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {os.uname().nodename}")
        handle.flush()
        self.held = handle
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.held is not None
        self.held.close()  # and with it the lock
