"""Tasks of state: counting steps since a token, and a memory of one bit."""

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from relpos.tasks.task import DIGITS, Example, Task, with_answers

VARIABLES = tuple("abc")
BEFORE = 4  # the most steps of a variable before it is set to zero, which do not count
ACTS, BITS = ("w", "r", "i"), ("0", "1")
WRITE, READ, _ = range(3)
SHARES = (0.1, 0.1, 0.8)  # of write, read and ignore, as in the training data of the paper


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
        ids, body = self.filler(length, "pass"), length - 2 * len(VARIABLES) - 1
        ids[np.sort(rng.choice(body, len(mixed), replace=False))] = mixed
        order = rng.permutation(len(VARIABLES))
        ids[body] = self.vocabulary["?"]
        ids[body + 1 :: 2], ids[body + 2 :: 2] = self.ids(VARIABLES)[order], self.ids(DIGITS)[values[order]]
        return with_answers(ids, slice(body + 2, None, 2))

    def solve(self, context: Sequence[str]) -> str:
        values: dict[str, int] = {}
        for word in context[: context.index("?")]:
            if word.endswith("=0"):
                values[word[0]] = 0
            elif word.endswith("+1") and word[0] in values:
                values[word[0]] += 1
        return str(values[context[-1]])


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
        ids = self.filler(length)
        ids[-2 * pairs :: 2], ids[-2 * pairs + 1 :: 2] = self.ids(ACTS)[acts], self.ids(BITS)[bits]
        return with_answers(ids, length - 2 * pairs + 1 + 2 * np.flatnonzero(acts == READ))

    def solve(self, context: Sequence[str]) -> str:
        last_write = max(i for i, word in enumerate(context) if word == "w")
        return context[last_write + 1]
