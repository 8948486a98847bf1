"""Which tokens of a text are scored, and how much of the text before them the model sees: docs/evaluation.md.

Every protocol gives the windows of each length. All lengths score the same tokens, as far as they divide each other:
what differs between two rows of a table is then the length, and not the text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from relpos.lab.data.tokens import Tokens, spread

LAST = 256  # tokens of a window that `last` scores
TOKENS = {"windows": 2**20, "last": 2**14, "sliding": 2**20, "positions": 2**18}  # scored at most, unless told


class Window(NamedTuple):
    """What the model reads at once, and which of its predictions count."""

    start: int  # place in the text of the first token read
    first: int  # place of the first token scored; the last is the one after the last read
    origin: int = 0  # where positions are counted from


@dataclass
class ScoredWindows:
    """The windows of every length that the text is long enough for, and a sentence for every other."""

    windows: dict[int, list[Window]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)

    def longest(self, lengths: Sequence[int], allowed: int, why: Callable[[int], str]) -> int | None:
        """The longest that is allowed; those beyond are refused."""
        self.refused = {length: why(length) for length in lengths if length > allowed}
        return max((length for length in lengths if length <= allowed), default=None)


def windows(text: Tokens, lengths: Sequence[int], tokens: int) -> ScoredWindows:
    """Non-overlapping windows, every token scored: the paper's.

    The text is cut into blocks of the longest length, and each block into windows of every length.
    """
    plan, room = ScoredWindows(), len(text) - 1
    longest = plan.longest(
        lengths, room, lambda length: f"the text has {len(text)} tokens; a window needs {length + 1}."
    )
    if longest is None:
        return plan
    blocks = [block * longest for block in spread(room // longest, max(1, tokens // longest))]
    for length in lengths:
        if length <= longest:
            starts = [start for block in blocks for start in range(block, block + longest - length + 1, length)]
            plan.windows[length] = [Window(start, start + 1) for start in starts]
    return plan


def last(text: Tokens, lengths: Sequence[int], tokens: int, scored: int) -> ScoredWindows:
    """The last `scored` tokens of a window, the same ones at every length, with the whole window in one document."""
    plan, documents = ScoredWindows(), _documents(text)
    longest = plan.longest(lengths, *_inside_one(documents))
    if longest is None:
        return plan
    ends = [end for begin, stop in documents for end in range(begin + longest, stop, scored)]
    chosen = [ends[number] for number in spread(len(ends), max(1, tokens // scored))]
    for length in lengths:
        if length <= longest:
            plan.windows[length] = [Window(end - length, end - scored + 1) for end in chosen]
    return plan


def sliding(text: Tokens, lengths: Sequence[int], tokens: int, stride: int | None) -> ScoredWindows:
    """Every token scored once, by a window that moves by `stride`: at least length − stride tokens stand before it."""
    plan, room = ScoredWindows(), len(text) - 1
    longest = plan.longest(
        lengths,
        room // 2,
        lambda length: (
            f"the text has {len(text)} tokens; sliding windows of {length} need {2 * length + 1}: "
            "as many to stand before as to be scored."
        ),
    )
    if longest is None:
        return plan
    # The first `longest` tokens are never scored: then every length finds its context before the same tokens.
    blocks = [longest * (1 + block) for block in spread(room // longest - 1, max(1, tokens // longest))]
    for length in lengths:
        if length <= longest:
            step = stride or max(1, length // 2)
            plan.windows[length] = [
                window for block in blocks for window in _slide(block, block + step, block + longest, length, step)
            ]
    return plan


def positions(text: Tokens, length: int, tokens: int) -> ScoredWindows:
    """Non-overlapping windows inside one document, every token scored, and its position in the window remembered."""
    plan, documents = ScoredWindows(), _documents(text)
    if plan.longest([length], *_inside_one(documents)) is None:
        return plan
    starts = [start for begin, stop in documents for start in range(begin, stop - length, length)]
    chosen = [starts[number] for number in spread(len(starts), max(1, tokens // length))]
    plan.windows[length] = [Window(start, start + 1, start) for start in chosen]
    return plan


def control(found: Sequence[Window], length: int, trained: int, stride: int) -> list[Window]:
    """The tokens of these windows again, by shorter ones of the trained length that move by `stride` inside them."""
    return [
        window
        for one in found
        for window in _slide(one.start, one.start + trained, one.start + length, trained, stride, one.start)
    ]


def _slide(done: int, end: int, stop: int, length: int, stride: int, origin: int = 0) -> list[Window]:
    """Windows that end at `end`, every `stride` after, and at `stop`; each scores what the one before has left."""
    found = []
    for after in (*range(end, stop, stride), stop):
        found.append(Window(after - length, done + 1, origin))
        done = after
    return found


def _documents(text: Tokens) -> list[tuple[int, int]]:
    """Where each document begins, and where the next one does."""
    starts = [int(start) for start in text.starts]
    return list(zip(starts, [*starts[1:], len(text)], strict=True))


def _inside_one(documents: Sequence[tuple[int, int]]) -> tuple[int, Callable[[int], str]]:
    """The longest window inside one document, and the sentence for longer ones."""
    longest = max(stop - begin for begin, stop in documents)
    return (
        longest - 1,
        lambda length: f"the longest document has {longest} tokens; a window inside one document needs {length + 1}.",
    )
