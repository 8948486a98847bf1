"""The copying tasks: all letters, or those scattered among dots."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.random import Generator

from relpos.tasks.task import Example, Task, with_answers

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
FEW_LETTERS = LETTERS[:16]  # of selective copying
COUNT = 16  # letters to copy selectively, at every length: only the gaps grow


class Copy(Task):
    """Random letters, then the same letters again."""

    measures = "finding a place by order alone: the more letters, the less their neighbours identify them"
    layout = "letters, |, the same letters; a dot first if the length is even"
    paper = "Graves et al. 2014 (Neural Turing Machines), arXiv 1410.5401; Jelassi et al. 2024, arXiv 2402.01032"
    words: ClassVar[tuple[str, ...]] = (".", "|", *LETTERS)
    shortest = 9
    chance = 1 / len(LETTERS)
    draws_lengths = True  # at one length, every answer is at one distance: no order has to be found

    def sample(self, rng: Generator, length: int, depth: float | None = None) -> Example:
        count = (length - 1) // 2
        letters = rng.choice(self.ids(LETTERS), count)
        ids = self.filler(length)
        ids[-2 * count - 1 : -count - 1] = ids[-count:] = letters
        ids[-count - 1] = self.vocabulary["|"]
        return with_answers(ids, slice(-count, None))

    def solve(self, context: Sequence[str]) -> str:
        bar = context.index("|")  # after it as many have been copied as there are words
        letters = [word for word in context[:bar] if word != "."]
        return letters[len(context) - bar - 1]


class SelectiveCopy(Copy):
    """Letters scattered among dots, then the same letters in order."""

    measures = "keeping the order of letters when the distances between them are random"
    layout = "16 letters anywhere among dots, |, the 16 letters"
    paper = "Gu and Dao 2023 (Mamba), arXiv 2312.00752, after Arjovsky et al. 2016, arXiv 1511.06464"
    words = (".", "|", *FEW_LETTERS)
    shortest = 2 * COUNT + 1
    chance = 1 / len(FEW_LETTERS)
    draws_lengths = False  # the gaps are random at every length

    def sample(self, rng: Generator, length: int, depth: float | None = None) -> Example:
        letters = rng.choice(self.ids(FEW_LETTERS), COUNT)
        ids = self.filler(length)
        ids[np.sort(rng.choice(length - COUNT - 1, COUNT, replace=False))] = letters
        ids[-COUNT - 1] = self.vocabulary["|"]
        ids[-COUNT:] = letters
        return with_answers(ids, slice(-COUNT, None))
