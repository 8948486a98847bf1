"""Selective copying."""

import numpy as np
from numpy.random import Generator

from relpos.lab.tasks.task import Example, Task

LETTERS = tuple("abcdefghijklmnop")
COUNT = 16  # at every length: only the gaps grow


class SelectiveCopy(Task):
    """A few letters scattered among blanks, then the letters alone, in order."""

    measures = "whether order is kept when the distances between the letters tell nothing"
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
