"""Associative recall with several questions."""

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from relpos.tasks.task import Example, Task

PAIRS = 4  # at every length: only their distance grows
KEYS = tuple(f"k{i}" for i in range(16))
VALUES = tuple(f"v{i}" for i in range(16))


class Recall(Task):
    """Key-value pairs among dots, then every key is followed by its value."""

    measures = "finding a token by its content and reading the token after it, however far back"
    layout = "4 pairs of key and value anywhere among dots, ?, then the 4 keys in another order, each with its value"
    paper = "multi-query associative recall: Arora et al. 2023 (Zoology), arXiv 2312.04927"
    words = (".", "?", *KEYS, *VALUES)
    shortest = 4 * PAIRS + 1
    chance = 1 / len(VALUES)

    def sample(self, rng: Generator, length: int, depth: float | None = None) -> Example:
        keys = rng.choice(self.ids(KEYS), PAIRS, replace=False)
        values = rng.choice(self.ids(VALUES), PAIRS)
        ids = np.full(length, self.vocabulary["."])
        body = length - 2 * PAIRS - 1
        # Drawn as if each pair took one place, then shifted by the pairs before it, so that no two overlap.
        places = np.sort(rng.choice(body - PAIRS, PAIRS, replace=False)) + np.arange(PAIRS)
        ids[places], ids[places + 1] = keys, values
        order = rng.permutation(PAIRS)
        ids[body] = self.vocabulary["?"]
        ids[body + 1 :: 2], ids[body + 2 :: 2] = keys[order], values[order]
        answers = np.zeros(length, dtype=np.bool_)
        answers[body + 2 :: 2] = True
        return Example(ids, answers)

    def solve(self, context: Sequence[str]) -> str:
        pairs = context[: context.index("?")]
        return pairs[pairs.index(context[-1]) + 1]
