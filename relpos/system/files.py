"""Folders and files that appear whole or not at all, and the folder for what can be computed again."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def cache_folder() -> Path:
    """Where tokens and trained tokenizers are kept: RELPOS_CACHE, or the user's cache folder."""
    own = os.environ.get("RELPOS_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relpos"


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A folder to write into; it gets its name only when everything is on the disk.

    If another process was faster, its folder stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield part
        publish(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def publish(part: Path, folder: Path) -> None:
    """Bring every byte of `part` to the disk, then give it its name."""
    for file in part.rglob("*"):
        if file.is_file():
            flush(file)
    flush(part)
    try:
        part.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    flush(folder.parent)


def flush(path: Path) -> None:
    """Bring a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(file: Path, text: str) -> None:
    """Write a file whole: the name holds the old text or the new, never a part."""
    write_bytes(file, text.encode())


def write_bytes(file: Path, data: bytes) -> None:
    """The same for bytes."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        part.write_bytes(data)
        flush(part)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
