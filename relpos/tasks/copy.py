"""The copying tasks: all letters, or those scattered among dots."""

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from relpos.tasks.task import Example, Task

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
FEW_LETTERS = LETTERS[:16]  # of selective copying
COUNT = 16  # letters to copy selectively, at every length: only the gaps grow


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


class SelectiveCopy(Task):
    """Letters scattered among dots, then the same letters in order."""

    measures = "keeping the order of letters when the distances between them are random"
    layout = "16 letters anywhere among dots, |, the 16 letters"
    paper = "Gu and Dao 2023 (Mamba), arXiv 2312.00752, after Arjovsky et al. 2016, arXiv 1511.06464"
    words = (".", "|", *FEW_LETTERS)
    shortest = 2 * COUNT + 1
    chance = 1 / len(FEW_LETTERS)

    def sample(self, rng: Generator, length: int, depth: float | None = None) -> Example:
        letters = rng.choice(self.ids(FEW_LETTERS), COUNT)
        ids = np.full(length, self.vocabulary["."])
        ids[np.sort(rng.choice(length - COUNT - 1, COUNT, replace=False))] = letters
        ids[-COUNT - 1] = self.vocabulary["|"]
        ids[-COUNT:] = letters
        answers = np.zeros(length, dtype=np.bool_)
        answers[-COUNT:] = True
        return Example(ids, answers)

    def solve(self, context: Sequence[str]) -> str:
        return next_letter(context)


def next_letter(context: Sequence[str]) -> str:
    """The letter to copy next: after "|" as many have been copied as there are words."""
    bar = context.index("|")
    letters = [word for word in context[:bar] if word != "."]
    return letters[len(context) - bar - 1]
