"""Locks that only one process holds at a time, and that the system releases when that process ends, even if killed."""

import os
import platform
from pathlib import Path
from types import TracebackType
from typing import IO

from relpos.system.file_locks import release, try_to_lock, wait_and_lock
from relpos.system.files import writing

LOCK = ".lock"  # the file of a lock, unless it has another name
IN_USE = "{folder} is in use by {holder}: wait for it or stop it."


class HeldError(ValueError):
    """Another process holds the lock."""


class Lock:
    """A lock on a folder, used in a `with` statement.

    Args:
        folder: The folder; it is created if it does not exist.
        name: The name of the lock's file in the folder. Locks with different names are independent.
        wait: Wait until the lock is free instead of raising an error.
        in_use: The message of the error; `{folder}` and `{holder}` are replaced.

    Raises:
        HeldError: Another process holds the lock, and `wait` is false.
        OSError: The folder cannot be written.

    Example:
        >>> with Lock(Path("runs/alibi")):
        ...     ...  # no other process is here
    """

    def __init__(self, folder: Path, name: str = LOCK, wait: bool = False, in_use: str = IN_USE) -> None:
        self.folder, self.name, self.wait, self.in_use = folder, name, wait, in_use
        self._handle: IO[str] | None = None

    def __enter__(self) -> "Lock":
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = (self.folder / self.name).open("a+", encoding="utf-8")
        if self.wait:
            wait_and_lock(handle.fileno())
        elif not try_to_lock(handle.fileno()):
            handle.close()
            holder = lock_holder(self.folder, self.name)
            raise HeldError(self.in_use.format(folder=self.folder, holder=holder)) from None
        # The file of a process that was killed still names that process, but does not hold the lock.
        with writing(self.folder / self.name):
            handle.truncate(0)
            handle.write(f"process {os.getpid()} on {platform.node()}")
            handle.flush()
        self._handle = handle
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._handle is not None
        release(self._handle.fileno())
        self._handle.close()


def lock_holder(folder: Path, name: str = LOCK) -> str:
    """The process that holds a lock or held it last, for example "process 4711 on laptop"."""
    try:
        return (folder / name).read_text(encoding="utf-8").strip() or "another process"
    except FileNotFoundError:  # the lock is on another machine
        return "another process"
