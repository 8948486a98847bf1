"""The copying task."""

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from relpos.tasks.task import Example, Task

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")


class Copy(Task):
    """Random letters, then the same letters again."""

    measures = "finding a place by order alone: the more letters, the less their neighbours identify them"
    layout = "letters, |, the same letters; a dot first if the length is even"
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

    def solve(self, context: Sequence[str]) -> str:
        return next_letter(context)


def next_letter(context: Sequence[str]) -> str:
    """The letter to copy next: after "|" as many have been copied as there are words."""
    bar = context.index("|")
    letters = [word for word in context[:bar] if word != "."]
    return letters[len(context) - bar - 1]
