"""What every task is: sequences of words, some of which are answers that follow from the words before them."""

import hashlib
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Portion = Literal["train", "heldout"]
PAD, UNKNOWN = "<pad>", "<unk>"  # the first two entries of every vocabulary
HELDOUT_SHARE = 10  # one sequence in ten is held out
EXAMPLE = 40  # tokens


@dataclass(frozen=True)
class Example:
    """One sequence."""

    ids: NDArray[np.int64]  # (length,)
    answers: NDArray[np.bool_]  # (length,), the tokens that are scored
    depth: float | None = None  # where what is asked for stands: 0 at the beginning, 1 at the end


class Task:
    """A task. A subclass states its card and its words, and writes one sequence at random."""

    measures: ClassVar[str]
    layout: ClassVar[str]
    paper: ClassVar[str]
    words: ClassVar[tuple[str, ...]]  # the same at every length
    shortest: ClassVar[int]  # tokens that a sequence needs
    chance: ClassVar[float]  # share of answers that a guess gets right
    has_depth: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.vocabulary = {word: i for i, word in enumerate((PAD, UNKNOWN, *self.words))}

    @property
    def summary(self) -> str:
        """What it is, in a line."""
        return (type(self).__doc__ or "").strip().split("\n", 1)[0]

    @property
    def digest(self) -> str:
        """Another one for other words or other rules: what was found with the old ones does not hold for them."""
        first = self.draw(2 * self.shortest, 0, 0, "train")
        return hashlib.sha256(f"{' '.join(self.vocabulary)} {self.text(first)}".encode()).hexdigest()[:24]

    def sample(self, rng: Generator, length: int, depth: float | None = None) -> Example:
        """A sequence of exactly `length` tokens; `depth` only where the task has one, anywhere unless given."""
        raise NotImplementedError

    def ids(self, words: Iterable[str]) -> NDArray[np.int64]:
        """The ids of words."""
        return np.array([self.vocabulary[word] for word in words], dtype=np.int64)

    def text(self, sample: Example) -> str:
        """A sequence as people read it, its answers in brackets."""
        words = list(self.vocabulary)
        told = zip(sample.ids, sample.answers, strict=True)
        return " ".join(f"[{words[i]}]" if answer else words[i] for i, answer in told)

    def example(self) -> str:
        """A short sequence, for people."""
        return self.text(self.draw(max(self.shortest, EXAMPLE), 0, 0, "heldout"))

    def check_length(self, length: int) -> None:
        """Refuse what is too short."""
        if length < self.shortest:
            raise ValueError(f"a sequence of {self.name} has at least {self.shortest} tokens, not {length}.")

    def draw(self, length: int, seed: int, index: int, part: Portion, depth: float | None = None) -> Example:
        """The sequence of a number, always the same.

        The part that a sequence belongs to is decided by its content, as with documents: whatever the seeds, none that
        is tested on was ever trained on.
        """
        self.check_length(length)
        rng = np.random.default_rng([zlib.crc32(self.name.encode()), length, seed, index])
        while True:
            found = self.sample(rng, length, depth)
            if (zlib.crc32(found.ids.tobytes()) % HELDOUT_SHARE == 0) == (part == "heldout"):
                return found
