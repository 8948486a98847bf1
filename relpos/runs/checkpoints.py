"""What a run writes while it trains: checkpoints, written atomically with checksums that reveal damage, and its log."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from relpos.system.files import publish
from relpos.system.seal import damage, seal

WEIGHTS = "model.safetensors"
CLOCK = "clock.json"  # the seconds of training before the checkpoint
FILE = "log.jsonl"
LOSSES = ("loss", "heldout")


def checkpoints(out: Path) -> list[Path]:
    """The checkpoint folders of a run, newest first, including damaged ones."""
    named = [folder for folder in out.glob("checkpoint-*") if re.fullmatch(r"checkpoint-[0-9]+", folder.name)]
    return sorted((folder for folder in named if folder.is_dir()), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The training step at which a checkpoint was written."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def newest_undamaged(out: Path, say: Callable[[str], None] | None = None) -> Path | None:
    """The newest checkpoint that is not damaged, or None; `say` receives a message for every newer one that is."""
    for folder in checkpoints(out):
        reason = damage(folder)
        if reason is None:
            return folder
        if say is not None:
            say(f"{folder} is damaged and is skipped: {reason}.")
    return None


def install(temporary: Path, folder: Path, keep: int) -> None:
    """Add checksums to a written checkpoint, rename it to checkpoint-N, and keep so many undamaged checkpoints."""
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


def read_log(out: Path) -> list[dict[str, float]]:
    """The entries of a run's log, each with its step and tokens; a line that was cut off by a kill is left out."""
    file = out / FILE
    try:
        lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else []
    except UnicodeDecodeError as error:
        raise _not_a_log(file, f"it is not UTF-8 at byte {error.start}") from None
    except IsADirectoryError:
        raise _not_a_log(file, "it is a folder") from None
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if not isinstance(entry, dict) or not all(_is_number(entry.get(key)) for key in ("step", "tokens")):
            raise _not_a_log(file, f"line {number} has no step and tokens")
        if not all(_is_number(value) for value in entry.values()):
            raise _not_a_log(file, f"line {number} has values that are not numbers")
        entries.append(entry)
    return entries


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _not_a_log(file: Path, reason: str) -> ValueError:
    return ValueError(
        f"{file} is not the log of a run: {reason}. Remove it: the run resumes without its earlier losses."
    )
