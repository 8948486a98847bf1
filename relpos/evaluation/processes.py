"""The processes that share every window of an evaluation, a slice of its tokens each; by default one."""

import contextlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist
from transformers import PreTrainedModel

from relpos.models.context import divide_sequences


class Processes:
    """One process, or all of a launch by torchrun.

    Args:
        several: Whether the windows are divided among the processes of the launch.

    Raises:
        ValueError: There is one process only, although there should be several.
    """

    def __init__(self, several: bool = False) -> None:
        self.number, self.rank = 1, 0
        if not several:
            return
        from accelerate import PartialState

        self.state = PartialState(cpu=not torch.cuda.is_available())
        self.number, self.rank = self.state.num_processes, self.state.process_index
        if self.number == 1:
            raise ValueError(
                "--context-parallel divides every window among the processes of a launch, and there is 1: start "
                "several, as in torchrun --nproc-per-node 2 -m relpos.cli evaluate …"
            )

    @property
    def writes(self) -> bool:
        """Whether this process writes the files and prints."""
        return self.rank == 0

    def in_turn(self) -> contextlib.AbstractContextManager[Any]:
        """A context that the first process goes through before the others, which then use what it has cached."""
        return contextlib.nullcontext() if self.number == 1 else self.state.main_process_first()

    def divide(self, model: PreTrainedModel) -> None:
        """Let a model read slices.

        Raises:
            ValueError: It cannot.
        """
        if self.number > 1:
            world = dist.group.WORLD
            assert world is not None
            divide_sequences(model, world)

    def first_says(self, value: Any) -> Any:
        """The value of the first process, for all."""
        if self.number == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def check_length(self, length: int) -> None:
        """Refuse windows that cannot be divided.

        Raises:
            ValueError: The length is not a multiple of the number of processes.
        """
        if length % self.number:
            raise ValueError(
                f"windows of {length} tokens cannot be divided among {self.number} processes evenly: give a multiple."
            )

    def own(self, x: Tensor) -> Tensor:
        """This process's slice of (batch, length)."""
        return x.chunk(self.number, dim=1)[self.rank]

    def joined(self, losses: Tensor) -> NDArray[np.float32]:
        """The losses of all tokens (batch, length), from those of each slice."""
        if self.number == 1:
            return losses.cpu().numpy()
        parts = [torch.empty_like(losses) for _ in range(self.number)]
        dist.all_gather(parts, losses.contiguous())
        return torch.cat(parts, dim=1).cpu().numpy()
