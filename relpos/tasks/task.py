"""The base class of tasks: sequences of words, some of which are answers that follow from the words before them."""

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from relpos.text.corpus import Portion

PAD, UNKNOWN = "<pad>", "<unk>"  # the first two entries of every vocabulary
HELDOUT_SHARE = 10  # one sequence in ten is held out
EXAMPLE = 40  # tokens of the example that is printed


@dataclass(frozen=True)
class Example:
    """One sequence of a task.

    Attributes:
        ids: Token ids (length,).
        answers: Which tokens are answers and are scored (length,).
        depth: Where the relevant passage is, from 0 (beginning) to 1 (end); None in a task without depth.
    """

    ids: NDArray[np.int64]
    answers: NDArray[np.bool_]
    depth: float | None = None


class Task:
    """Base class of tasks.

    A subclass sets the attributes below and defines `sample`, which draws a sequence, and `solve`, which finds an
    answer from the words alone; tests compare the two. The first line of its docstring is its summary.

    Attributes:
        measures: What the task measures.
        layout: What a sequence looks like.
        paper: Where the task comes from.
        words: The vocabulary, the same at every length.
        shortest: The shortest length in tokens.
        chance: The share of answers that guessing gets right.
        has_depth: Whether `sample` takes a depth.

    Args:
        name: The name in the registry.
    """

    measures: ClassVar[str]
    layout: ClassVar[str]
    paper: ClassVar[str]
    words: ClassVar[tuple[str, ...]]
    shortest: ClassVar[int]
    chance: ClassVar[float]
    has_depth: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.vocabulary = {word: i for i, word in enumerate((PAD, UNKNOWN, *self.words))}

    def sample(self, rng: Generator, length: int, depth: float | None = None) -> Example:
        """Draw a sequence at random.

        Args:
            rng: The generator of all random choices.
            length: The exact number of tokens, at least `shortest`.
            depth: Where the relevant passage is, if the task has a depth; random by default.
        """
        raise NotImplementedError

    def solve(self, context: Sequence[str]) -> str:
        """The answer that follows a context.

        Args:
            context: The words before the answer; earlier answers are among them.
        """
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

    def text(self, example: Example) -> str:
        """A sequence as text, with its answers in brackets."""
        words = list(self.vocabulary)
        tokens = zip(example.ids, example.answers, strict=True)
        return " ".join(f"[{words[i]}]" if answer else words[i] for i, answer in tokens)

    def example(self) -> str:
        """A short sequence as text."""
        return self.text(self.draw(max(self.shortest, EXAMPLE), 0, 0, "heldout"))

    def check_length(self, length: int) -> None:
        """Raise a ValueError if a length is too short for the task."""
        if length < self.shortest:
            raise ValueError(f"a sequence of {self.name} has at least {self.shortest} tokens, not {length}.")

    def draw(self, length: int, seed: int, index: int, portion: Portion, depth: float | None = None) -> Example:
        """Draw the sequence of an index; the same arguments always give the same sequence.

        The content of a sequence decides its portion, as with documents. So no held-out sequence is ever trained on,
        whatever the seeds.

        Args:
            length: The number of tokens.
            seed: The seed; other seeds give other sequences.
            index: The index of the sequence.
            portion: "train" or "heldout".
            depth: Where the relevant passage is, if the task has a depth; random by default.

        Raises:
            ValueError: The length is too short for the task.
        """
        self.check_length(length)
        rng = np.random.default_rng([zlib.crc32(self.name.encode()), length, seed, index])
        while True:
            example = self.sample(rng, length, depth)
            if (zlib.crc32(example.ids.tobytes()) % HELDOUT_SHARE == 0) == (portion == "heldout"):
                return example
