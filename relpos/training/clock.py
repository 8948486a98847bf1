"""The time a run has trained, including the time before it was interrupted, and its time limit."""

import time
from typing import Any

import torch
import torch.distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


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
