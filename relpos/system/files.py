"""Atomic writes: a file or folder under its name is always complete. And the folder of the cache."""

import contextlib
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


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Write a folder that appears under its name only when it is complete.

    If another process has written the folder in the meantime, that folder is kept and this one is removed. After an
    error nothing is left.

    Args:
        folder: The final name; parent folders are created.

    Yields:
        A temporary folder beside it, to write the files into.

    Example:
        >>> with atomic_folder(Path("cache/tokens")) as temporary:
        ...     (temporary / "ids").write_bytes(data)
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield temporary
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
    """
    write_bytes(file, text.encode())


def write_bytes(file: Path, data: bytes) -> None:
    """Write bytes to a file atomically, as `write_text` does with text."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        flush(temporary)
        _replace(temporary, file)
    finally:
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
