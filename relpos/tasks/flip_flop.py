"""The flip-flop language."""

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from relpos.tasks.task import Example, Task

ACTS, BITS = ("w", "r", "i"), ("0", "1")
WRITE, READ, _ = range(3)
SHARES = (0.1, 0.1, 0.8)  # of write, read and ignore, as in the training data of the paper


class FlipFlop(Task):
    """A memory of one bit: write, ignore, read the bit that was written last."""

    measures = "finding the last token of a kind again and again without a mistake"
    layout = "pairs of w, r or i and a bit, the first w, the last r; a dot first if the length is odd"
    paper = "Liu et al. 2023 (flip-flop language modeling), arXiv 2306.00946, with their 80 % of ignore"
    words = (".", *ACTS, *BITS)
    shortest = 16
    chance = 1 / len(BITS)

    def sample(self, rng: Generator, length: int, depth: float | None = None) -> Example:
        pairs = length // 2
        acts = rng.choice(3, pairs, p=SHARES)
        acts[0], acts[-1] = WRITE, READ
        bits = rng.integers(2, size=pairs)
        last = np.maximum.accumulate(np.where(acts == WRITE, np.arange(pairs), 0))  # the last write before each pair
        bits = np.where(acts == READ, bits[last], bits)
        ids = np.full(length, self.vocabulary["."])
        ids[-2 * pairs :: 2], ids[-2 * pairs + 1 :: 2] = self.ids(ACTS)[acts], self.ids(BITS)[bits]
        answers = np.zeros(length, dtype=np.bool_)
        answers[-2 * pairs + 1 :: 2] = acts == READ
        return Example(ids, answers)

    def solve(self, context: Sequence[str]) -> str:
        last_write = max(i for i, word in enumerate(context) if word == "w")
        return context[last_write + 1]
