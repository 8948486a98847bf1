"""How long a run has trained, over all its parts, and when its time is up."""

import time
from typing import Any

import torch
import torch.distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class Clock(TrainerCallback):
    """Counts seconds of training. With a limit it ends the run, and tells the schedule how far it is.

    All processes follow the first one's clock: with clocks of their own they would stop at different steps.
    """

    def __init__(self, minutes: float | None) -> None:
        self.limit = None if minutes is None else 60 * minutes
        self.before = 0.0  # seconds of earlier parts of the run
        self.begun = time.monotonic()
        self.first = 0
        self.fraction = 0.0  # of the limit, as of the last step

    @property
    def seconds(self) -> float:
        """Seconds trained so far."""
        return self.before + time.monotonic() - self.begun

    def left(self, step: int, steps: int) -> float | None:
        """Seconds to the end, by the speed so far."""
        by_steps = None
        if step > self.first:
            by_steps = (steps - step) * (time.monotonic() - self.begun) / (step - self.first)
        if self.limit is None:
            return by_steps
        by_clock = max(self.limit - self.seconds, 0.0)
        return by_clock if by_steps is None else min(by_clock, by_steps)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.begun, self.first = time.monotonic(), state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.limit is None:
            return
        fraction = torch.tensor(self.seconds / self.limit, device=args.device)
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(fraction, src=0)
        self.fraction = float(fraction)
        if self.fraction >= 1:
            control.should_training_stop = control.should_save = control.should_evaluate = control.should_log = True
