"""The end of a run: copy its model to where from_pretrained finds it, plot its losses, write result.json."""

import filecmp
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from relpos.models.saved import write_stub
from relpos.pictures.curves import draw_losses
from relpos.pictures.printed_page import save
from relpos.runs.checkpoints import CLOCK, LOSSES, newest_undamaged, read_log, step_of
from relpos.runs.results import RESULT, RunResult, write_card
from relpos.runs.settings import Settings
from relpos.system.files import flush, write_text, writing
from relpos.system.mappings import read_json
from relpos.system.seal import SEAL
from relpos.training.distributed import OPTIMIZER
from relpos.training.log import Clock
from relpos.training.trainer import UNLOGGED, cannot_write

STATE = {CLOCK, SEAL, UNLOGGED, OPTIMIZER, "trainer_state.json"}  # a checkpoint's files that are not the model's
MODEL_SUFFIXES = (".safetensors", ".json", ".txt", ".jinja")


def finish(settings: Settings, out: Path, clock: Clock, say: Callable[[str], None]) -> None:
    """Copy the model of the last undamaged checkpoint into the run's folder, and write the result.

    Args:
        settings: The settings of the run.
        out: The run's folder.
        clock: The clock of the run.
        say: Receives the result in a sentence, and warnings.
    """
    last = newest_undamaged(out)
    if last is None:
        raise ValueError(f"{out} has no undamaged checkpoint, although one was just written: check the disk.")
    try:
        _copy_model(last, out, say)
        if _finished_step(out) == step_of(last):
            return
        result = _result(settings, out, step_of(last), clock)
        save(draw_losses(read_log(out), out.name), out / "loss.png")
        write_card(out, result)
        write_text(out / RESULT, json.dumps(result, indent=1))
    except OSError as error:
        raise cannot_write(out, "the trained model", error) from error
    start, end = (_format(result[name]) for name in ("heldout_at_start", "heldout"))
    say(f"{out}: loss {_format(result['loss'])}, held-out {start} → {end}")
    if "warning" in result:
        say(f"warning: {result['warning']}")


def _copy_model(checkpoint: Path, out: Path, say: Callable[[str], None]) -> None:
    """Copy the files of the model that are missing or damaged."""
    files = [file for file in sorted(checkpoint.iterdir()) if file.suffix in MODEL_SUFFIXES and file.name not in STATE]
    changed = [file for file in files if not _same(file, out / file.name)]
    if changed and _finished_step(out) == step_of(checkpoint):
        say(f"{', '.join(file.name for file in changed)} in {out} was damaged: copied again from {checkpoint}.")
    for file in changed:
        temporary = out / f".{file.name}.part"
        with writing(out / file.name):
            shutil.copyfile(file, temporary)
            flush(temporary)
            temporary.replace(out / file.name)
    write_stub(out)


def _same(file: Path, other: Path) -> bool:
    """Whether two files are the same, except for what `write_stub` adds to config.json."""
    if not other.is_file():
        return False
    if file.name != "config.json":
        return filecmp.cmp(file, other, shallow=False)
    try:
        copy = read_json(other)
    except ValueError:
        return False
    copy.pop("auto_map", None)
    return copy == read_json(file)


def _finished_step(out: Path) -> int | None:
    """The step in result.json; None if the file does not exist or is damaged and has to be written again."""
    try:
        return int(read_json(out / RESULT)["step"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _result(settings: Settings, out: Path, step: int, clock: Clock) -> RunResult:
    losses = {name: [entry[name] for entry in read_log(out) if name in entry] for name in LOSSES}
    result: RunResult = {
        "step": step,
        "tokens": step * settings.run.batch_size * settings.data.length,
        "seconds": round(clock.seconds, 1),
        "loss": losses["loss"][-1] if losses["loss"] else None,
        "heldout": losses["heldout"][-1] if losses["heldout"] else None,
        "heldout_at_start": losses["heldout"][0] if losses["heldout"] else None,
    }
    warning = _too_short(settings, step)
    return result if warning is None else {**result, "warning": warning}


def _too_short(settings: Settings, step: int) -> str | None:
    """A warning if the clock has ended the run before the learning rate reached its full value."""
    minutes, steps, warmup = settings.run.minutes, settings.run.steps, settings.optimizer.warmup_steps or 0
    if minutes is None or step > max(warmup, 1) or (steps is not None and step >= steps):
        return None
    rises = f", and the learning rate rises over the first {warmup}" if warmup else ""
    return (
        f"{minutes:g} minutes were enough for {step} step{'' if step == 1 else 's'} only{rises}: the model has hardly "
        "been trained. Give more minutes, a smaller model or shorter windows."
    )


def _format(loss: float | None) -> str:
    return "unknown" if loss is None else f"{loss:.4f}"
