"""Counting."""

import numpy as np
from numpy.random import Generator

from relpos.lab.tasks.task import Example, Task

VARIABLES = tuple("abc")
DIGITS = tuple("0123456789")
BEFORE = 4  # steps of a variable that its zero makes void, at most


class Count(Task):
    """Variables set to zero and stepped up among idle tokens, then each is asked for its value."""

    measures = "whether every occurrence since a certain token is counted, wherever they stand"
    layout = "a=0, a+1, b=0, … anywhere among pass, up to 9 steps each, ?, then the variables with their values"
    paper = "the counting task of Golovneva et al. 2024 (CoPE), arXiv 2405.18719, with all values asked for at the end"
    words = (
        "pass",
        "?",
        *(f"{name}=0" for name in VARIABLES),
        *(f"{name}+1" for name in VARIABLES),
        *VARIABLES,
        *DIGITS,
    )
    shortest = len(VARIABLES) * (BEFORE + 1 + len(DIGITS) - 1 + 2) + 1
    chance = 1 / len(DIGITS)

    def sample(self, rng: Generator, length: int, depth: float | None = None) -> Example:
        void = rng.integers(BEFORE + 1, size=len(VARIABLES))
        values = rng.integers(len(DIGITS), size=len(VARIABLES))
        zero, step = self.ids(f"{name}=0" for name in VARIABLES), self.ids(f"{name}+1" for name in VARIABLES)
        does = np.concatenate(
            [np.repeat([step[i], zero[i], step[i]], [void[i], 1, values[i]]) for i in range(len(VARIABLES))]
        )
        # Whose turn it is is shuffled; what a variable does stays in order.
        turns = rng.permutation(np.repeat(np.arange(len(VARIABLES)), void + 1 + values))
        mixed = np.empty_like(does)
        mixed[np.argsort(turns, kind="stable")] = does
        body = length - 2 * len(VARIABLES) - 1
        ids = np.full(length, self.vocabulary["pass"])
        ids[np.sort(rng.choice(body, len(mixed), replace=False))] = mixed
        order = rng.permutation(len(VARIABLES))
        ids[body] = self.vocabulary["?"]
        ids[body + 1 :: 2], ids[body + 2 :: 2] = self.ids(VARIABLES)[order], self.ids(DIGITS)[values[order]]
        answers = np.zeros(length, dtype=np.bool_)
        answers[body + 2 :: 2] = True
        return Example(ids, answers)
