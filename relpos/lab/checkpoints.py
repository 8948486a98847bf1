"""Checkpoints that are whole or not there, and that show when they have been damaged since."""

import json
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

from relpos.lab.atomic import publish

SEAL = "sealed.json"


def checkpoints(out: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    found = [folder for folder in out.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", folder.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The step a checkpoint was written at."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def seal(folder: Path) -> None:
    """Write down the size and checksum of every file."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    sums = {str(file.relative_to(folder)): [file.stat().st_size, _checksum(file)] for file in files}
    (folder / SEAL).write_text(json.dumps(sums, indent=1), encoding="utf-8")


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None if it is as it was written."""
    try:
        sums = json.loads((folder / SEAL).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{SEAL} is missing or cannot be read"
    for name, (size, checksum) in sums.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, and was written with {size}"
        if _checksum(file) != checksum:
            return f"{name} has other contents than were written"
    return None


def newest_whole(out: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole; those passed over are named."""
    for folder in checkpoints(out):
        wrong = damage(folder)
        if wrong is None:
            return folder
        say(f"{folder} is damaged and passed over: {wrong}.")
    return None


def install(part: Path, folder: Path, keep: int) -> None:
    """Seal a written checkpoint, give it its name, and remove the oldest beyond `keep`."""
    seal(part)
    if folder.exists():  # a damaged one that was passed over and has been reached again
        shutil.rmtree(folder)
    publish(part, folder)
    for old in checkpoints(folder.parent)[keep:]:
        shutil.rmtree(old)


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as handle:
        while block := handle.read(2**22):
            value = zlib.crc32(block, value)
    return value
