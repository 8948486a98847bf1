"""The counting task."""

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from relpos.tasks.task import Example, Task

VARIABLES = tuple("abc")
DIGITS = tuple("0123456789")
BEFORE = 4  # the most steps of a variable before it is set to zero, which do not count


class Count(Task):
    """Variables set to zero and incremented among idle tokens, then each is followed by its value."""

    measures = "counting every occurrence since a certain token, wherever they are"
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
        actions = np.concatenate(
            [np.repeat([step[i], zero[i], step[i]], [void[i], 1, values[i]]) for i in range(len(VARIABLES))]
        )
        # The turns of the variables are shuffled; the actions of each variable stay in order.
        turns = rng.permutation(np.repeat(np.arange(len(VARIABLES)), void + 1 + values))
        mixed = np.empty_like(actions)
        mixed[np.argsort(turns, kind="stable")] = actions
        body = length - 2 * len(VARIABLES) - 1
        ids = np.full(length, self.vocabulary["pass"])
        ids[np.sort(rng.choice(body, len(mixed), replace=False))] = mixed
        order = rng.permutation(len(VARIABLES))
        ids[body] = self.vocabulary["?"]
        ids[body + 1 :: 2], ids[body + 2 :: 2] = self.ids(VARIABLES)[order], self.ids(DIGITS)[values[order]]
        answers = np.zeros(length, dtype=np.bool_)
        answers[body + 2 :: 2] = True
        return Example(ids, answers)

    def solve(self, context: Sequence[str]) -> str:
        values: dict[str, int] = {}
        for word in context[: context.index("?")]:
            if word.endswith("=0"):
                values[word[0]] = 0
            elif word.endswith("+1") and word[0] in values:
                values[word[0]] += 1
        return str(values[context[-1]])
