"""The checkpoints of a run: written atomically, with checksums that reveal later damage."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from relpos.system.files import publish
from relpos.system.seal import damage, seal

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
