"""What a run reports: a live line for people, and JSON lines for programs."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from relpos.lab.runs.log_file import FILE, LOSSES, read_log
from relpos.lab.train.clock import Clock
from relpos.system.files import write_text
from relpos.system.progress import LiveLine, clock_time

KEYS = {"loss": "loss", "eval_loss": "heldout", "learning_rate": "lr", "grad_norm": "gradient"}


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
