"""What a run tells: a line for the eyes, JSON lines for programs, a plot at the end."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from relpos.lab.atomic import write_text
from relpos.lab.clock import Clock
from relpos.lab.live import LiveLine, clock_time

FILE = "log.jsonl"
LOSSES = ("loss", "heldout")
KEYS = {"loss": "loss", "eval_loss": "heldout", "learning_rate": "rate", "grad_norm": "gradient"}


class Log(TrainerCallback):
    """Writes log.jsonl in the run's folder, and the live line."""

    def __init__(self, out: Path, tokens: int, clock: Clock) -> None:
        self.out, self.tokens, self.clock = out, tokens, clock  # tokens a step
        self.speed: float | None = None
        self.losses: dict[str, tuple[float, int]] = {}  # the last of each kind, and its step
        self.mark = (0, time.monotonic())  # step and time of the last line, for the speed
        self.line = LiveLine()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.mark = (state.global_step, time.monotonic())
        if state.is_world_process_zero:
            # A killed run may have logged steps after its last checkpoint; they are about to be done again. A run that
            # starts anew evaluates at step 0 again.
            before = [entry for entry in read_log(self.out) if 0 < state.global_step >= entry["step"]]
            for entry in before:
                self._remember(entry)
            write_text(self.out / FILE, "".join(json.dumps(entry) + "\n" for entry in before))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True  # the last loss, however far apart the lines are

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        found = {KEYS[key]: value for key, value in (logs or {}).items() if key in KEYS}
        if not found or not state.is_world_process_zero:
            return
        step, now = state.global_step, time.monotonic()
        for name in LOSSES:
            if not math.isfinite(found.get(name, 0.0)):
                raise ValueError(
                    f"the {name} is {found[name]} at step {step}: the learning rate may be too high. "
                    "What was saved before is still there."
                )
        entry: dict[str, float] = {"step": step, "tokens": step * self.tokens, "seconds": round(self.clock.seconds, 2)}
        if "loss" in found:
            entry["tokens_per_second"] = round((step - self.mark[0]) * self.tokens / max(now - self.mark[1], 1e-9), 1)
            self.mark = (step, now)
        else:
            self.mark = (self.mark[0], self.mark[1] + float((logs or {}).get("eval_runtime", 0.0)))
        entry |= found
        with (self.out / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        self.speed = entry.get("tokens_per_second", self.speed)
        self._remember(entry)
        self.show(state)

    def _remember(self, entry: Mapping[str, float]) -> None:
        self.losses |= {name: (entry[name], int(entry["step"])) for name in LOSSES if name in entry}

    def show(self, state: TrainerState) -> None:
        """The live line; a loss of an earlier step says which."""
        step, left = state.global_step, self.clock.left(state.global_step, state.max_steps)
        words = [f"step {step}" + (f"/{state.max_steps}" if self.clock.limit is None else "")]
        for name in LOSSES:
            if name in self.losses:
                loss, when = self.losses[name]
                words.append(f"{name} {loss:.4f}" + ("" if when == step else f" (step {when})"))
        if self.speed is not None:
            words.append(f"{self.speed:,.0f} tokens/s")
        if left is not None:
            words.append(f"{clock_time(left)} left")
        self.line("  ".join(words))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.line.end()


def read_log(out: Path) -> list[dict[str, float]]:
    """The entries of a run's log; a line cut short by a kill is left out.

    Raises:
        ValueError: the file is no log: it has a line that is JSON but no entry, or is not UTF-8.
    """
    file = out / FILE
    try:
        lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else []
    except UnicodeDecodeError as error:
        raise _no_log(file, f"it is not UTF-8 at byte {error.start}") from None
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if not isinstance(entry, dict) or not all(_is_number(entry.get(key)) for key in ("step", "tokens")):
            raise _no_log(file, f"line {number} has no step and tokens")
        if not all(_is_number(value) for value in entry.values()):
            raise _no_log(file, f"line {number} has values that are not numbers")
        entries.append(entry)
    return entries


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _no_log(file: Path, reason: str) -> ValueError:
    return ValueError(f"{file} is no log of a run: {reason}. Remove it: the run resumes without its earlier losses.")


def plot_loss(out: Path) -> Path:
    """Draw the losses of a run's log over its tokens."""
    from matplotlib.figure import Figure

    entries = read_log(out)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name in LOSSES:
        points = [(entry["tokens"], entry[name]) for entry in entries if name in entry]
        if points:
            axes.plot(*zip(*points, strict=True), label={"loss": "train"}.get(name, name))
    axes.set(xlabel="tokens", ylabel="loss", title=out.name)
    if axes.lines:
        axes.legend()
    path = out / "loss.png"
    figure.savefig(path, dpi=120)
    return path
