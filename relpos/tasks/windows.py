"""The sequences of a task as a dataset to train on, and their tokenizer: one entry per word, which people can read."""

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from relpos.tasks.task import PAD, UNKNOWN, Task
from relpos.text.corpus import Portion
from relpos.text.tokens import IGNORED


def task_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a task; words are separated by spaces."""
    words = Tokenizer(models.WordLevel(task.vocabulary, unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, unk_token=UNKNOWN)


class TaskWindows(Dataset[dict[str, Tensor]]):
    """Sequences of a task by index, each drawn when it is read, so that there may be billions of them.

    Only the answers have labels, unless `all_tokens` have. With `shortest`, lengths are drawn from there to `length`,
    and the end of the window, where no token attends to it, is padded.
    """

    def __init__(
        self,
        task: Task,
        portion: Portion,
        length: int,
        count: int,
        seed: int = 0,
        all_tokens: bool = False,
        shortest: int | None = None,
    ) -> None:
        task.check_length(shortest or length)
        self.task, self.portion, self.length, self.count = task, portion, length, count
        self.seed, self.all_tokens, self.shortest = seed, all_tokens, shortest or length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)  # a loop over the dataset ends by this error
        length = int(np.random.default_rng([self.seed, index]).integers(self.shortest, self.length + 1))
        example = self.task.draw(length, self.seed, index, self.portion)
        padding = (0, self.length - length)
        ids = np.pad(example.ids, padding)  # the id of the padding token is 0
        scored = np.pad(example.answers | self.all_tokens, padding)
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(np.where(scored, ids, IGNORED))}
