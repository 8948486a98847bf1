"""A training that is interrupted, and what is compared of two runs."""

import contextlib
from pathlib import Path

import pytest

from relpos.training.trainer import RelposTrainer

WEIGHTS = "model.safetensors"


@contextlib.contextmanager
def interrupted_after(steps: int):
    """Two micro-batches a step; Ctrl-C in the middle of the step after."""
    calls, step = 0, RelposTrainer.training_step

    def counted(self, *args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 2 * steps + 2:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RelposTrainer, "training_step", counted)
        with pytest.raises(KeyboardInterrupt):
            yield


def same_weights(a: Path, b: Path) -> bool:
    return (a / WEIGHTS).read_bytes() == (b / WEIGHTS).read_bytes()
