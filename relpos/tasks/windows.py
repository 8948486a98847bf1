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

    Args:
        task: The task.
        portion: "train" or "heldout".
        length: Tokens per window.
        count: The number of sequences.
        seed: The seed of the sequences.
        all_tokens: Whether all tokens have labels; otherwise only the answers have.
        shortest: Draw lengths from here to `length`, and pad the end of the window, where no token attends to it.
            By default all sequences have `length` tokens.

    Raises:
        ValueError: The length is too short for the task.
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
        task.check_length(length if shortest is None else shortest)
        self.task, self.portion, self.length, self.count = task, portion, length, count
        self.seed, self.all_tokens = seed, all_tokens
        self.shortest = length if shortest is None else shortest

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
