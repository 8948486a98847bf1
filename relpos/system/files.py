"""Files: atomic writes, errors that name the file, JSON and YAML mappings, locks, and the folder of the cache."""

import contextlib
import errno
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

Entries = dict[str, Any]  # of a JSON or YAML file
PATIENCE = 2.0  # seconds to wait on Windows for readers of a file that is replaced


def cache_folder() -> Path:
    """The folder for token ids, tokenizers and checks of GPU kernels: RELPOS_CACHE, or `relpos` in the user's cache."""
    folder = os.environ.get("RELPOS_CACHE")
    return Path(folder) if folder else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relpos"


# -- Writing


def why_not_written(path: Path, error: BaseException) -> tuple[str, str]:
    """Why a file or folder could not be written, and what to do about it: two parts of a sentence.

    `error` is that of the write, or one that was raised from it.
    """
    cause: BaseException | None = error
    while cause is not None and getattr(cause, "errno", None) is None:
        cause = cause.__cause__
    number = getattr(cause, "errno", None)
    existing = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path())
    free = shutil.disk_usage(existing).free / 2**20
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk is full, {free:,.0f} MB are free", "free some space"
    if number == errno.EROFS:
        return "the file system is read-only", "choose another folder"
    if number in (errno.EACCES, errno.EPERM):
        return f"you may not write to {existing}", "choose another folder or change its permissions"
    if number == errno.EISDIR or (path.is_dir() and isinstance(cause, OSError)):
        return "there is a folder of that name", "rename or remove it"
    if number in (errno.ENOTDIR, errno.EEXIST):
        return f"{existing} is a file, not a folder", "choose another folder"
    reason = os.strerror(number) if number is not None else " ".join(str(error).split()).rstrip(".")
    return f"{reason}, and {free:,.0f} MB are free", "check the disk"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file or folder in the errors of writing it: "No space left on device" alone does not say where."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a sentence already
            raise
        reason, advice = why_not_written(path, error)
        raise type(error)(f"{path} could not be written: {reason}. {advice.capitalize()}.") from error


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Write files into a temporary folder, which gets the name `folder` when it is complete.

    If another process has written the folder in the meantime, that folder is kept. After an error nothing is left.
    """
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield temporary
        with writing(folder):
            publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, folder: Path) -> None:
    """Flush every file of a temporary folder to the disk, then rename the folder, unless that name is taken."""
    for file in temporary.rglob("*"):
        if file.is_file():
            flush(file)
    flush(temporary)
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    flush(folder.parent)


def flush(path: Path) -> None:
    """Flush a file, or the list of names in a folder, to the disk."""
    windows = sys.platform == "win32"
    if windows and path.is_dir():
        return  # Windows opens no folders, and writes the list of names by itself
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)  # Windows flushes only what can be written
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(file: Path, text: str) -> None:
    """Write a text file atomically: after a crash the file holds the old text or the new one, never a mixture."""
    write_bytes(file, text.encode())


def write_bytes(file: Path, data: bytes) -> None:
    """Write bytes to a file atomically, as `write_text` does with text."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with writing(file):
        try:
            temporary.write_bytes(data)
            flush(temporary)
            _replace(temporary, file)
        finally:
            with contextlib.suppress(OSError):  # in a folder that cannot be written, there is none
                temporary.unlink(missing_ok=True)


def _replace(temporary: Path, file: Path) -> None:
    """Rename a file over another. Windows refuses as long as a reader has the old one open."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            temporary.replace(file)
        except PermissionError:
            if sys.platform != "win32" or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


# -- Reading mappings


def read_json(file: Path) -> Entries:
    """Read the JSON object in a file; a ValueError says what is wrong with the file."""
    return _mapping(file, "JSON")


def read_yaml(file: Path) -> Entries:
    """Read the YAML mapping in a file; a ValueError says what is wrong with the file."""
    return _mapping(file, "YAML")


def _mapping(file: Path, kind: str) -> Entries:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {file}.") from None
    except IsADirectoryError:
        raise IsADirectoryError(f"{file} is a folder: a {kind} file is needed.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not valid {kind}: it is not UTF-8 at byte {error.start}.") from None
    if not text.strip():
        raise ValueError(f"{file} is empty: a {kind} mapping is needed.")
    tree: Any
    if kind == "JSON":
        try:
            tree = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{file} is not valid JSON: {error}") from None
    else:
        import yaml

        try:
            tree = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{file} must hold a mapping of names to values, not {type(tree).__name__}.")
    return {str(key): value for key, value in tree.items()}


# -- Locks

LOCK = ".lock"  # the default name of a lock's file
IN_USE = "{folder} is in use by {holder}: wait for it or stop it."
# Some network file systems have no locks, for example Lustre without its option flock. A single process works there
# all the same; on a cluster, the executor starts each part once.
UNSUPPORTED = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}


class HeldError(ValueError):
    """Another process holds the lock."""


class Lock:
    """A lock on a folder that only one process holds at a time; the system releases it when that process ends.

    Locks with different names are independent. Without `wait`, a lock that is held is a HeldError with the message
    `in_use`.
    """

    def __init__(self, folder: Path, name: str = LOCK, wait: bool = False, in_use: str = IN_USE) -> None:
        self.folder, self.name, self.wait, self.in_use = folder, name, wait, in_use
        self._file: IO[bytes] | None = None

    def __enter__(self) -> "Lock":
        from filelock import lock_descriptor  # imports asyncio, which only those who lock need

        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / self.name).open("ab", buffering=0)
        try:
            free = lock_descriptor(file.fileno(), blocking=self.wait)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            free = True
        if not free:
            file.close()
            raise HeldError(self.in_use.format(folder=self.folder, holder=lock_holder(self.folder, self.name)))
        # The file of a process that was killed still names that process, but does not hold the lock.
        with writing(self.folder / self.name):
            file.truncate(0)
            file.write(f" process {os.getpid()} on {platform.node()}".encode())
        self._file = file
        return self

    def __exit__(self, *error: object) -> None:
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
