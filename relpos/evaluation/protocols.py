"""Which tokens of a text each protocol scores, and how much context the model reads before them: docs/evaluation.md.

All lengths score the same tokens, as far as the lengths divide each other: two rows of a table then differ in the
length, and not in the text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from relpos.evaluation.options import EVAL_TOKENS, LAST, ProtocolName
from relpos.forms.checks import integer_at_least
from relpos.system.errors import unknown
from relpos.text.tokens import Tokens, spread


class Window(NamedTuple):
    """A part of the text that the model reads in one pass, and which of its predictions are scored."""

    start: int  # index in the text of the first token read
    first: int  # index of the first token scored; the last token scored is the one after the last read
    origin: int = 0  # index from which positions are counted


@dataclass
class ScoredWindows:
    """The windows of every length that the text is long enough for, and the reason for every other length."""

    windows: dict[int, list[Window]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)

    def longest(self, lengths: Sequence[int], allowed: int, why: Callable[[int], str]) -> int | None:
        """Return the longest length that is allowed, and refuse those beyond it."""
        self.refused = {length: why(length) for length in lengths if length > allowed}
        return max((length for length in lengths if length <= allowed), default=None)


def plan_windows(
    text: Tokens,
    lengths: Sequence[int],
    protocol: ProtocolName,
    stride: int | None = None,
    last_tokens: int | None = None,
    eval_tokens: int | None = None,
) -> ScoredWindows:
    """The windows of a protocol, by its name.

    Args:
        text: The tokens, with the beginnings of their documents.
        lengths: In increasing order.
        protocol: windows, last, sliding or positions.
        stride: Of `sliding` and `positions`.
        last_tokens: Of `last`: how many tokens at the end of each window are scored.
        eval_tokens: How many tokens to score at each length, at most.

    Returns:
        The windows of each length.

    Raises:
        ValueError: There is no such protocol, or an option is not one of its own.
    """
    if protocol not in EVAL_TOKENS:
        raise unknown("protocol", protocol, EVAL_TOKENS)
    if stride is not None and protocol not in ("sliding", "positions"):
        raise ValueError(f"a stride is for the protocols sliding and positions, not for {protocol}.")
    if last_tokens is not None and protocol != "last":
        raise ValueError(f"the number of last tokens is for the protocol last, not for {protocol}.")
    tokens = EVAL_TOKENS[protocol] if eval_tokens is None else integer_at_least("eval_tokens", eval_tokens)
    if protocol == "windows":
        return windows(text, lengths, tokens)
    if protocol == "last":
        scored = min(LAST, lengths[0]) if last_tokens is None else integer_at_least("last", last_tokens)
        if scored > lengths[0]:
            raise ValueError(f"the last {scored} tokens of a window cannot be scored at length {lengths[0]}.")
        return last(text, lengths, tokens, scored)
    if protocol == "sliding":
        if stride is not None and integer_at_least("stride", stride) > lengths[0]:
            raise ValueError(f"windows of {lengths[0]} tokens that move by {stride} would leave tokens out.")
        return sliding(text, lengths, tokens, stride)
    if len(lengths) > 1:
        raise ValueError(f"the protocol positions takes one length, not {len(lengths)}.")
    return positions(text, lengths[0], tokens)


def windows(text: Tokens, lengths: Sequence[int], tokens: int) -> ScoredWindows:
    """Non-overlapping windows in which every token is scored: the protocol of the CABLE paper.

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
    """Windows inside one document that score their last `scored` tokens: the same tokens at every length."""
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
    """Windows that move by `stride` and score every token once, with at least length − stride tokens before it."""
    plan, room = ScoredWindows(), len(text) - 1
    longest = plan.longest(
        lengths,
        room // 2,
        lambda length: (
            f"the text has {len(text)} tokens; sliding windows of {length} need {2 * length + 1}: "
            "as many for the context as to be scored."
        ),
    )
    if longest is None:
        return plan
    # The first `longest` tokens are never scored: every length then has its full context before the same tokens.
    blocks = [longest * (1 + block) for block in spread(room // longest - 1, max(1, tokens // longest))]
    for length in lengths:
        if length <= longest:
            step = stride or max(1, length // 2)
            plan.windows[length] = [
                window for block in blocks for window in _slide(block, block + step, block + longest, length, step)
            ]
    return plan


def positions(text: Tokens, length: int, tokens: int) -> ScoredWindows:
    """Non-overlapping windows inside one document in which every token is scored by its position in the window."""
    plan, documents = ScoredWindows(), _documents(text)
    if plan.longest([length], *_inside_one(documents)) is None:
        return plan
    starts = [start for begin, stop in documents for start in range(begin, stop - length, length)]
    chosen = [starts[number] for number in spread(len(starts), max(1, tokens // length))]
    plan.windows[length] = [Window(start, start + 1, start) for start in chosen]
    return plan


def control(scored: Sequence[Window], length: int, trained: int, stride: int) -> list[Window]:
    """Windows of the trained length that move by `stride` inside those of `positions`, and score the same tokens."""
    return [
        short
        for window in scored
        for short in _slide(window.start, window.start + trained, window.start + length, trained, stride, window.start)
    ]


def _slide(scored_up_to: int, end: int, stop: int, length: int, stride: int, origin: int = 0) -> list[Window]:
    """Windows that end at `end`, at every `stride` after it, and at `stop`; each scores what is not yet scored."""
    moved = []
    for window_end in (*range(end, stop, stride), stop):
        moved.append(Window(window_end - length, scored_up_to + 1, origin))
        scored_up_to = window_end
    return moved


def _documents(text: Tokens) -> list[tuple[int, int]]:
    """The index at which each document begins, and that at which the next one does."""
    starts = [int(start) for start in text.starts]
    return list(zip(starts, [*starts[1:], len(text)], strict=True))


def _inside_one(documents: Sequence[tuple[int, int]]) -> tuple[int, Callable[[int], str]]:
    """The longest window inside one document, and the reason why longer ones are refused."""
    longest = max(stop - begin for begin, stop in documents)
    return (
        longest - 1,
        lambda length: f"the longest document has {longest} tokens; a window inside one document needs {length + 1}.",
    )
