"""Atomic writes: a file or folder under its name is always complete. Errors of writing. And the folder of the cache."""

import contextlib
import errno
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE = 2.0  # seconds to wait on Windows for readers of a file that is replaced


def cache_folder() -> Path:
    """The folder for token ids and trained tokenizers: RELPOS_CACHE, or `relpos` in the user's cache folder."""
    own = os.environ.get("RELPOS_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relpos"


def why_not_written(path: Path, error: BaseException) -> tuple[str, str]:
    """Why a file or folder could not be written, and what to do about it.

    Args:
        path: The file or folder.
        error: The error of the write, or one that was raised from it.

    Returns:
        The reason and the advice, each the part of a sentence.
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
    """Name the file or folder in the errors of writing it: "No space left on device" alone does not say where.

    Args:
        path: The file or folder that is written.

    Raises:
        OSError: It cannot be written; of the same type as the system's error.

    Example:
        >>> with writing(file), file.open("a") as handle:
        ...     handle.write(line)
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a sentence already
            raise
        reason, advice = why_not_written(path, error)
        raise type(error)(f"{path} could not be written: {reason}. {advice.capitalize()}.") from error


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Write a folder that appears under its name only when it is complete.

    If another process has written the folder in the meantime, that folder is kept and this one is removed. After an
    error nothing is left.

    Args:
        folder: The final name; parent folders are created.

    Yields:
        A temporary folder beside it, to write the files into.

    Raises:
        OSError: The folder cannot be written. Errors of the body are its own.

    Example:
        >>> with atomic_folder(Path("cache/tokens")) as temporary:
        ...     (temporary / "ids").write_bytes(data)
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
    """Flush every file of a temporary folder to the disk, then rename the folder.

    Args:
        temporary: The folder with the written files.
        folder: Its new name, on the same disk. If a folder of this name exists, it is kept.
    """
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
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)  # Windows flushes what can be written only
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(file: Path, text: str) -> None:
    """Write a text file atomically: after a crash the file holds the old text or the new one, never a mixture.

    Args:
        file: The file; its folder must exist.
        text: The contents, written as UTF-8.

    Raises:
        OSError: The file cannot be written.
    """
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
    """Rename a file over another. Windows refuses while anyone reads the old one, who is soon done."""
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
