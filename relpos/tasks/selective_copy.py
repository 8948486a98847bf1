"""The selective copying task."""

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from relpos.tasks.copy import next_letter
from relpos.tasks.task import Example, Task

LETTERS = tuple("abcdefghijklmnop")
COUNT = 16  # at every length: only the gaps grow


class SelectiveCopy(Task):
    """Letters scattered among dots, then the same letters in order."""

    measures = "keeping the order of letters when the distances between them are random"
    layout = "16 letters anywhere among dots, |, the 16 letters"
    paper = "Gu and Dao 2023 (Mamba), arXiv 2312.00752, after Arjovsky et al. 2016, arXiv 1511.06464"
    words = (".", "|", *LETTERS)
    shortest = 2 * COUNT + 1
    chance = 1 / len(LETTERS)

    def sample(self, rng: Generator, length: int, depth: float | None = None) -> Example:
        letters = rng.choice(self.ids(LETTERS), COUNT)
        ids = np.full(length, self.vocabulary["."])
        ids[np.sort(rng.choice(length - COUNT - 1, COUNT, replace=False))] = letters
        ids[-COUNT - 1] = self.vocabulary["|"]
        ids[-COUNT:] = letters
        answers = np.zeros(length, dtype=np.bool_)
        answers[-COUNT:] = True
        return Example(ids, answers)

    def solve(self, context: Sequence[str]) -> str:
        return next_letter(context)
