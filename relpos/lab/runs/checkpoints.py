"""The checkpoints of a run: written atomically, with checksums that reveal later damage."""

import json
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

from relpos.system.files import publish
from relpos.system.mappings import read_json

SEAL = "sealed.json"  # the size and checksum of every other file of a checkpoint
WEIGHTS = "model.safetensors"
CLOCK = "clock.json"  # the seconds of training before the checkpoint


def checkpoints(out: Path) -> list[Path]:
    """List the checkpoint folders of a run, newest first, including damaged ones.

    Args:
        out: The run's folder.
    """
    named = [folder for folder in out.glob("checkpoint-*") if re.fullmatch(r"checkpoint-[0-9]+", folder.name)]
    return sorted((folder for folder in named if folder.is_dir()), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The training step at which a checkpoint was written."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def seal(folder: Path) -> None:
    """Write the size and checksum of every file of a checkpoint into the file SEAL."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    sums = {str(file.relative_to(folder)): [file.stat().st_size, _checksum(file)] for file in files}
    (folder / SEAL).write_text(json.dumps(sums, indent=1), encoding="utf-8")


def damage(folder: Path, only: str | None = None) -> str | None:
    """Check a checkpoint against its checksums.

    Args:
        folder: The checkpoint's folder.
        only: The name of a file, to check that file only.

    Returns:
        What is wrong, in words; None if nothing is.
    """
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


def newest_undamaged(out: Path, say: Callable[[str], None] | None = None) -> Path | None:
    """The newest checkpoint that is not damaged; None if there is none.

    Args:
        out: The run's folder.
        say: Receives a message for every damaged checkpoint that is newer.
    """
    for folder in checkpoints(out):
        reason = damage(folder)
        if reason is None:
            return folder
        if say is not None:
            say(f"{folder} is damaged and is skipped: {reason}.")
    return None


def install(temporary: Path, folder: Path, keep: int) -> None:
    """Add checksums to a written checkpoint, rename it, and remove the oldest checkpoints.

    Args:
        temporary: The folder with the checkpoint's files.
        folder: Its final name, checkpoint-N in the run's folder.
        keep: How many undamaged checkpoints are kept.
    """
    seal(temporary)
    if folder.is_dir() and not folder.is_symlink():  # a damaged one: the run has resumed before it and come here again
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)  # not a checkpoint, but something with its name
    publish(temporary, folder)
    kept = 0
    for checkpoint in checkpoints(folder.parent):
        if kept == keep:
            shutil.rmtree(checkpoint)
        elif checkpoint == folder or damage(checkpoint) is None:  # damaged ones do not count
            kept += 1


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as handle:
        while block := handle.read(2**22):
            value = zlib.crc32(block, value)
    return value
