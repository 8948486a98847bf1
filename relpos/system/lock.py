"""Locks that only one process holds at a time, and that the system releases when that process ends, even if killed."""

import errno
import os
import platform
from pathlib import Path
from types import TracebackType
from typing import IO

from relpos.system.files import writing

LOCK = ".lock"  # the default name of a lock's file
IN_USE = "{folder} is in use by {holder}: wait for it or stop it."
# Some network file systems have no locks, for example Lustre without its option flock. A single process works there
# all the same; on a cluster, the executor starts each part once.
UNSUPPORTED = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}


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
        self._file: IO[bytes] | None = None

    def __enter__(self) -> "Lock":
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / self.name).open("ab", buffering=0)
        if not _lock(file, self.wait):
            file.close()
            raise HeldError(self.in_use.format(folder=self.folder, holder=lock_holder(self.folder, self.name)))
        # The file of a process that was killed still names that process, but does not hold the lock.
        with writing(self.folder / self.name):
            file.truncate(0)
            file.write(f" process {os.getpid()} on {platform.node()}".encode())
        self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from filelock import unlock_descriptor

        assert self._file is not None
        try:
            unlock_descriptor(self._file.fileno())
        except OSError as failure:
            if failure.errno not in UNSUPPORTED:
                raise
        finally:
            self._file.close()


def lock_holder(folder: Path, name: str = LOCK) -> str:
    """The process that holds a lock or held it last, for example "process 4711 on laptop"."""
    try:
        with (folder / name).open("rb", buffering=0) as file:
            file.seek(1)  # on Windows the first byte is locked, and nobody else can read it
            return file.read().decode().strip() or "another process"
    except FileNotFoundError:  # the lock is on another machine
        return "another process"


def _lock(file: IO[bytes], wait: bool) -> bool:
    """Lock an open file; False if another process has locked it."""
    from filelock import lock_descriptor  # imports asyncio, which only those who lock need

    try:
        return lock_descriptor(file.fileno(), blocking=wait)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return True
