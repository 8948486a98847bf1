"""Sizes and checksums of files, written beside them, that reveal later damage.

A folder that is complete when it is written (a checkpoint, the tokens of a corpus) has one file with the size and
checksum of every other. An entry of a JSON file that grows has a checksum of its own.
"""

import json
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relpos.system.files import Entries, Lock, atomic_folder, read_json, writing

SEAL = "sealed.json"  # the size and checksum of every other file of a folder
CHECKSUM = "checksum"  # of an entry of a JSON file
BLOCK = 2**22  # bytes read at a time


def seal(folder: Path) -> None:
    """Write the size and checksum of every file of a folder into the file SEAL."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    sums = {str(file.relative_to(folder)): [file.stat().st_size, _checksum(file)] for file in files}
    (folder / SEAL).write_text(json.dumps(sums, indent=1), encoding="utf-8")


def damage(folder: Path, only: str | None = None) -> str | None:
    """What is wrong with a sealed folder, or with one file of it; None if nothing. A gigabyte takes about a second."""
    try:
        sums = read_json(folder / SEAL)
    except (OSError, ValueError):
        return f"{SEAL} is missing or cannot be read"
    if not sums or not all(isinstance(entry, list) and len(entry) == 2 for entry in sums.values()):
        return f"{SEAL} does not hold sizes and checksums"
    for name, (size, checksum) in sums.items():
        if only is not None and name != only:
            continue
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, and was written with {size}"
        if _checksum(file) != checksum:
            return f"{name} has changed since it was written"
    return None


def cached_folder(folder: Path, write: Callable[[Path], None]) -> Path:
    """A folder of the cache: written once, checked at every use, and written again if it is damaged.

    Several processes may ask for the same folder. `write` writes the files into the temporary folder that it receives.
    """
    if not folder.exists():
        _write_sealed(folder, write)
        return folder
    if damage(folder) is None:
        return folder
    with Lock(folder.parent, f".{folder.name}.lock", wait=True):
        reason = damage(folder)
        if reason is not None:  # else another process has written it again in the meantime
            print(f"warning: {folder} is damaged and is written again: {reason}.", file=sys.stderr)
            # Renamed first: a folder that is half removed must not be found under its name.
            trash = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            folder.rename(trash / folder.name)
            try:
                _write_sealed(folder, write)
            finally:
                shutil.rmtree(trash, ignore_errors=True)
    return folder


def _write_sealed(folder: Path, write: Callable[[Path], None]) -> None:
    with atomic_folder(folder) as temporary, writing(folder):
        write(temporary)
        seal(temporary)


def signed(entry: Mapping[str, Any]) -> Entries:
    """An entry of a JSON file with its checksum, which `undamaged` checks."""
    return {**entry, CHECKSUM: _entry_checksum(entry)}


def undamaged(entry: object) -> Entries | None:
    """An entry of a JSON file, or its text, without its checksum; None if it has changed since it was `signed`."""
    if isinstance(entry, bytes):
        try:
            entry = json.loads(entry)
        except ValueError:
            return None
    if not isinstance(entry, dict):
        return None
    content = {key: value for key, value in entry.items() if key != CHECKSUM}
    return content if entry.get(CHECKSUM) == _entry_checksum(content) else None


def _entry_checksum(entry: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(entry).encode())


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as handle:
        while block := handle.read(BLOCK):
            value = zlib.crc32(block, value)
    return value
