"""The base class of tasks: sequences of words, some of which are answers that follow from the words before them."""

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from relpos.text.corpus import Portion

PAD, UNKNOWN = "<pad>", "<unk>"  # the first two entries of every vocabulary
DIGITS = tuple("0123456789")
HELDOUT_SHARE = 10  # one sequence in ten is held out
EXAMPLE = 40  # tokens of the example that is printed


@dataclass(frozen=True)
class Example:
    """One sequence of a task."""

    ids: NDArray[np.int64]  # (length,)
    answers: NDArray[np.bool_]  # (length,): which tokens are answers and are scored
    depth: float | None = None  # where the relevant passage is, from 0 (beginning) to 1 (end), if the task has a depth


class Task:
    """Base class of tasks.

    A subclass sets the attributes below and defines `sample`, which draws a sequence, and `solve`, which finds an
    answer from the words alone; tests compare the two. The first line of its docstring is its summary.
    """

    measures: ClassVar[str]  # what the task measures
    layout: ClassVar[str]  # what a sequence looks like
    paper: ClassVar[str]  # where the task comes from
    words: ClassVar[tuple[str, ...]]  # the vocabulary, the same at every length
    shortest: ClassVar[int]  # the shortest length in tokens
    chance: ClassVar[float]  # the share of answers that guessing gets right
    has_depth: ClassVar[bool] = False  # whether `sample` takes a depth
    draws_lengths: ClassVar[bool] = False  # whether training draws lengths, from the shortest on, unless told otherwise

    def __init__(self, name: str) -> None:
        self.name = name  # in the registry
        self.vocabulary = {word: i for i, word in enumerate((PAD, UNKNOWN, *self.words))}

    def sample(self, rng: Generator, length: int, depth: float | None = None) -> Example:
        """Draw a sequence of exactly `length` tokens; all random choices are those of `rng`."""
        raise NotImplementedError

    def solve(self, context: Sequence[str]) -> str:
        """The answer that follows a context of words; earlier answers are among them."""
        raise NotImplementedError

    @property
    def summary(self) -> str:
        """The task in one line."""
        return (type(self).__doc__ or "").strip().split("\n", 1)[0]

    @property
    def digest(self) -> str:
        """A hash that changes with the words or the rules, because results with other rules are not comparable."""
        first = self.draw(2 * self.shortest, 0, 0, "train")
        return hashlib.sha256(f"{' '.join(self.vocabulary)} {self.text(first)}".encode()).hexdigest()[:24]

    def ids(self, words: Iterable[str]) -> NDArray[np.int64]:
        """The token ids of words."""
        return np.array([self.vocabulary[word] for word in words], dtype=np.int64)

    def filler(self, length: int, word: str = ".") -> NDArray[np.int64]:
        """A sequence of one word, to be filled."""
        return np.full(length, self.vocabulary[word])

    def text(self, example: Example) -> str:
        """A sequence as text, with its answers in brackets."""
        words = list(self.vocabulary)
        tokens = zip(example.ids, example.answers, strict=True)
        return " ".join(f"[{words[i]}]" if answer else words[i] for i, answer in tokens)

    def example(self) -> str:
        """A short sequence as text."""
        return self.text(self.draw(max(self.shortest, EXAMPLE), 0, 0, "heldout"))

    def check_length(self, length: int) -> None:
        """Refuse a length that is too short for the task."""
        if length < self.shortest:
            raise ValueError(f"a sequence of {self.name} has at least {self.shortest} tokens, not {length}.")

    def draw(self, length: int, seed: int, index: int, portion: Portion, depth: float | None = None) -> Example:
        """Draw the sequence of an index; the same arguments always give the same sequence.

        The content of a sequence decides its portion, as with documents. So no held-out sequence is ever trained on,
        whatever the seeds. The depth of a task that has one is random by default.
        """
        self.check_length(length)
        rng = np.random.default_rng([zlib.crc32(self.name.encode()), length, seed, index])
        while True:
            example = self.sample(rng, length, depth)
            if (zlib.crc32(example.ids.tobytes()) % HELDOUT_SHARE == 0) == (portion == "heldout"):
                return example


def with_answers(ids: NDArray[np.int64], answers: Any, depth: float | None = None) -> Example:
    """A sequence whose answers are at the given indices."""
    marked = np.zeros(len(ids), dtype=np.bool_)
    marked[answers] = True
    return Example(ids, marked, depth)
