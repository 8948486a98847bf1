"""Checkpoints that are whole or not there, and that show when they have been damaged since."""

import json
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

from relpos.system.files import publish
from relpos.system.mappings import read_json

SEAL = "sealed.json"
WEIGHTS = "model.safetensors"
CLOCK = "clock.json"  # the seconds of training up to a checkpoint


def checkpoints(out: Path) -> list[Path]:
    """The folders of a run's checkpoints, newest first; damaged ones are among them."""
    named = [folder for folder in out.glob("checkpoint-*") if re.fullmatch(r"checkpoint-[0-9]+", folder.name)]
    return sorted((folder for folder in named if folder.is_dir()), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The step a checkpoint was written at."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def seal(folder: Path) -> None:
    """Write down the size and checksum of every file."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    sums = {str(file.relative_to(folder)): [file.stat().st_size, _checksum(file)] for file in files}
    (folder / SEAL).write_text(json.dumps(sums, indent=1), encoding="utf-8")


def damage(folder: Path, only: str | None = None) -> str | None:
    """What is wrong with a checkpoint, or with one file of it, in words; None if it is as it was written."""
    try:
        sums = read_json(folder / SEAL)
    except (OSError, ValueError):
        return f"{SEAL} is missing or cannot be read"
    if not sums or not all(isinstance(entry, list) and len(entry) == 2 for entry in sums.values()):
        return f"{SEAL} is no list of sizes and checksums"
    for name, (size, checksum) in sums.items():
        if only is not None and name != only:
            continue
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, and was written with {size}"
        if _checksum(file) != checksum:
            return f"{name} has other contents than were written"
    return None


def newest_whole(out: Path, say: Callable[[str], None] | None = None) -> Path | None:
    """The newest checkpoint that is whole; `say` is told of those that are damaged and newer."""
    for folder in checkpoints(out):
        wrong = damage(folder)
        if wrong is None:
            return folder
        if say is not None:
            say(f"{folder} is damaged and passed over: {wrong}.")
    return None


def install(part: Path, folder: Path, keep: int) -> None:
    """Seal a written checkpoint, give it its name, and remove the oldest beyond `keep` whole ones."""
    seal(part)
    if folder.is_dir() and not folder.is_symlink():  # a damaged one that was passed over and has been reached again
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)  # something else under the checkpoint's name
    publish(part, folder)
    whole = 0
    for checkpoint in checkpoints(folder.parent):
        if whole == keep:
            shutil.rmtree(checkpoint)
        elif checkpoint == folder or damage(checkpoint) is None:  # a damaged one must not push out a whole one
            whole += 1


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as handle:
        while block := handle.read(2**22):
            value = zlib.crc32(block, value)
    return value
