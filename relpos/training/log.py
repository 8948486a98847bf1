"""What a training run reports: its clock, which may end it, and its log."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from relpos.runs.checkpoints import FILE, LOSSES, read_log
from relpos.system.files import write_text
from relpos.system.progress import LiveLine, clock_time

# The names of Trainer and ours.
KEYS = {"loss": "loss", "eval_loss": "heldout", "learning_rate": "lr", "grad_norm": "gradient"}


class Clock(TrainerCallback):
    """Counts the seconds of training; with a limit, it ends the run and drives the learning rate schedule.

    All processes follow the clock of the first process, because otherwise they would stop at different steps.

    Args:
        minutes: The time limit; None for no limit.
    """

    def __init__(self, minutes: float | None) -> None:
        self.limit = None if minutes is None else 60 * minutes
        self.before = 0.0  # seconds before the checkpoint that the run was resumed from
        self.started = time.monotonic()
        self.first_step = 0
        self.fraction = 0.0  # the share of the limit that has passed, after the last step

    @property
    def seconds(self) -> float:
        """The seconds trained so far."""
        return self.before + time.monotonic() - self.started

    def left(self, step: int, steps: int) -> float | None:
        """Estimate the seconds until the end of the run.

        Args:
            step: The current step.
            steps: The last step.
        """
        by_steps = None
        if step > self.first_step:
            by_steps = (steps - step) * (time.monotonic() - self.started) / (step - self.first_step)
        if self.limit is None:
            return by_steps
        by_clock = max(self.limit - self.seconds, 0.0)
        return by_clock if by_steps is None else min(by_clock, by_steps)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.started, self.first_step = time.monotonic(), state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.limit is None:
            return
        fraction = torch.tensor(self.seconds / self.limit, device=args.device)
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(fraction, src=0)
        self.fraction = float(fraction)
        if self.fraction >= 1:
            control.should_training_stop = control.should_save = control.should_evaluate = control.should_log = True


class Log(TrainerCallback):
    """Writes log.jsonl into the run's folder and prints the live line.

    Args:
        out: The run's folder.
        tokens: Tokens per step.
        clock: The clock of the run.
    """

    def __init__(self, out: Path, tokens: int, clock: Clock) -> None:
        self.out, self.tokens, self.clock = out, tokens, clock
        self.speed: float | None = None  # tokens per second
        self.losses: dict[str, tuple[float, int]] = {}  # the last loss of each kind, and its step
        self.mark = (0, time.monotonic())  # step and time of the last entry, to compute the speed
        self.line = LiveLine()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.mark = (state.global_step, time.monotonic())
        if state.is_world_process_zero:
            # A killed run may have logged steps after its last checkpoint, which are trained again now. A run that
            # starts from the beginning evaluates at step 0 again.
            before = [entry for entry in read_log(self.out) if 0 < state.global_step >= entry["step"]]
            for entry in before:
                self._remember(entry)
            write_text(self.out / FILE, "".join(json.dumps(entry) + "\n" for entry in before))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True  # the last loss is always logged

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        values = {KEYS[key]: value for key, value in (logs or {}).items() if key in KEYS}
        if not values or not state.is_world_process_zero:
            return
        step, now = state.global_step, time.monotonic()
        for name in LOSSES:
            if not math.isfinite(values.get(name, 0.0)):
                raise ValueError(
                    f"the {name} is {values[name]} at step {step}: the learning rate may be too high. "
                    "The checkpoints saved before are kept."
                )
        entry: dict[str, float] = {"step": step, "tokens": step * self.tokens, "seconds": round(self.clock.seconds, 2)}
        if "loss" in values:
            entry["tokens_per_second"] = round((step - self.mark[0]) * self.tokens / max(now - self.mark[1], 1e-9), 1)
            self.mark = (step, now)
        else:
            self.mark = (self.mark[0], self.mark[1] + float((logs or {}).get("eval_runtime", 0.0)))
        entry |= values
        with (self.out / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        self.speed = entry.get("tokens_per_second", self.speed)
        self._remember(entry)
        self.show(state)

    def _remember(self, entry: Mapping[str, float]) -> None:
        self.losses |= {name: (entry[name], int(entry["step"])) for name in LOSSES if name in entry}

    def show(self, state: TrainerState) -> None:
        """Print the live line; a loss of an earlier step is printed with its step."""
        step, left = state.global_step, self.clock.left(state.global_step, state.max_steps)
        words = [f"step {step}" + (f"/{state.max_steps}" if self.clock.limit is None else "")]
        for name in LOSSES:
            if name in self.losses:
                loss, loss_step = self.losses[name]
                words.append(f"{name} {loss:.4f}" + ("" if loss_step == step else f" (step {loss_step})"))
        if self.speed is not None:
            words.append(f"{self.speed:,.0f} tokens/s")
        if left is not None:
            words.append(f"{clock_time(left)} left")
        self.line("  ".join(words))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.line.end()
