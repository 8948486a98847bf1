"""A task's sequences as the windows that a model is trained on."""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from relpos.lab.data.tokens import IGNORED
from relpos.lab.tasks.task import Portion, Task


class TaskWindows(Dataset[dict[str, Tensor]]):
    """`count` sequences by number, each made when it is asked for: as many as a run may ever want.

    Labels are the answers, or with `everything` all tokens. With `shortest`, lengths are drawn from there to `length`,
    and padding follows the sequence, where nothing sees it.
    """

    def __init__(
        self,
        task: Task,
        part: Portion,
        length: int,
        count: int,
        seed: int = 0,
        everything: bool = False,
        shortest: int | None = None,
    ) -> None:
        task.check_length(length if shortest is None else shortest)
        self.task, self.part, self.length, self.count = task, part, length, count
        self.seed, self.everything = seed, everything
        self.shortest = length if shortest is None else shortest

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)  # what ends a loop over them
        length = int(np.random.default_rng([self.seed, index]).integers(self.shortest, self.length + 1))
        sample = self.task.draw(length, self.seed, index, self.part)
        room = (0, self.length - length)
        ids = np.pad(sample.ids, room)  # the padding's id is 0
        told = np.pad(sample.answers | self.everything, room)
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(np.where(told, ids, IGNORED))}
