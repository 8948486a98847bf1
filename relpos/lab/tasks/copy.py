"""Copying."""

import numpy as np
from numpy.random import Generator

from relpos.lab.tasks.task import Example, Task

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")


class Copy(Task):
    """Random letters, then the same letters again."""

    measures = "whether a place is found by order alone: the more letters, the less their neighbours tell them apart"
    layout = "letters, |, the same letters; a dot first where the length is even"
    paper = "Graves et al. 2014 (Neural Turing Machines), arXiv 1410.5401; Jelassi et al. 2024, arXiv 2402.01032"
    words = (".", "|", *LETTERS)
    shortest = 9
    chance = 1 / len(LETTERS)

    def sample(self, rng: Generator, length: int, depth: float | None = None) -> Example:
        count = (length - 1) // 2
        letters = rng.choice(self.ids(LETTERS), count)
        ids = np.full(length, self.vocabulary["."])
        ids[-2 * count - 1 : -count - 1] = ids[-count:] = letters
        ids[-count - 1] = self.vocabulary["|"]
        answers = np.zeros(length, dtype=np.bool_)
        answers[-count:] = True
        return Example(ids, answers)
