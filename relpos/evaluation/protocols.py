"""Which tokens of a text each protocol scores, and how much context the model reads before them: docs/evaluation.md.

All lengths score the same tokens, as far as the lengths divide each other: two rows of a table then differ in the
length, and not in the text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from relpos.evaluation.evaluate_options import LAST, EvaluateOptions
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


def plan_windows(text: Tokens, lengths: Sequence[int], options: EvaluateOptions, tokens: int) -> ScoredWindows:
    """The windows of a protocol, whose options are checked: `tokens` to score at each of `lengths`, in order."""
    protocol, stride = options.protocol, options.stride
    if stride is not None and protocol not in ("sliding", "positions"):
        raise ValueError(f"a stride is for the protocols sliding and positions, not for {protocol}.")
    if options.last is not None and protocol != "last":
        raise ValueError(f"the number of last tokens is for the protocol last, not for {protocol}.")
    if protocol == "windows":
        return windows(text, lengths, tokens)
    if protocol == "last":
        scored = options.last or min(LAST, lengths[0])
        if scored > lengths[0]:
            raise ValueError(f"the last {scored} tokens of a window cannot be scored at length {lengths[0]}.")
        return last(text, lengths, tokens, scored)
    if protocol == "sliding":
        if stride is not None and stride > lengths[0]:
            raise ValueError(f"windows of {lengths[0]} tokens that move by {stride} would leave tokens out.")
        return sliding(text, lengths, tokens, stride)
    if len(lengths) > 1:
        raise ValueError(f"the protocol positions takes one length, not {len(lengths)}.")
    return positions(text, lengths[0], tokens)


def windows(text: Tokens, lengths: Sequence[int], tokens: int) -> ScoredWindows:
    """Non-overlapping windows in which every token is scored: the protocol of the CABLE paper.

    The text is cut into blocks of the longest length, and each block into windows of every length.
    """
    room = len(text) - 1
    plan, fitting = _fitting(
        lengths, room, lambda length: f"the text has {len(text)} tokens; a window needs {length + 1}."
    )
    longest = max(fitting, default=room + 1)
    blocks = [block * longest for block in spread(room // longest, max(1, tokens // longest))]
    for length in fitting:
        starts = [start for block in blocks for start in range(block, block + longest - length + 1, length)]
        plan.windows[length] = [Window(start, start + 1) for start in starts]
    return plan


def last(text: Tokens, lengths: Sequence[int], tokens: int, scored: int) -> ScoredWindows:
    """Windows inside one document that score their last `scored` tokens: the same tokens at every length."""
    documents = _documents(text)
    plan, fitting = _fitting(lengths, *_inside_one(documents))
    longest = max(fitting, default=len(text))
    ends = [end for begin, stop in documents for end in range(begin + longest, stop, scored)]
    chosen = [ends[number] for number in spread(len(ends), max(1, tokens // scored))]
    plan.windows = {length: [Window(end - length, end - scored + 1) for end in chosen] for length in fitting}
    return plan


def sliding(text: Tokens, lengths: Sequence[int], tokens: int, stride: int | None) -> ScoredWindows:
    """Windows that move by `stride` and score every token once, with at least length − stride tokens before it."""

    def why(length: int) -> str:
        return (
            f"the text has {len(text)} tokens; sliding windows of {length} need {2 * length + 1}: "
            "as many for the context as to be scored."
        )

    room = len(text) - 1
    plan, fitting = _fitting(lengths, room // 2, why)
    if not fitting:
        return plan
    longest = max(fitting)
    # The first `longest` tokens are never scored: every length then has its full context before the same tokens.
    blocks = [longest * (1 + block) for block in spread(room // longest - 1, max(1, tokens // longest))]
    for length in fitting:
        step = stride or max(1, length // 2)
        moved = (_slide(block, block + step, block + longest, length, step) for block in blocks)
        plan.windows[length] = [window for of_block in moved for window in of_block]
    return plan


def positions(text: Tokens, length: int, tokens: int) -> ScoredWindows:
    """Non-overlapping windows inside one document in which every token is scored by its position in the window."""
    documents = _documents(text)
    plan, fitting = _fitting([length], *_inside_one(documents))
    starts = [start for begin, stop in documents for start in range(begin, stop - length, length)]
    if fitting:
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


def _fitting(lengths: Sequence[int], allowed: int, why: Callable[[int], str]) -> tuple[ScoredWindows, list[int]]:
    """A plan that refuses the lengths beyond the longest that is allowed, and the other lengths."""
    refused = {length: why(length) for length in lengths if length > allowed}
    return ScoredWindows(refused=refused), [length for length in lengths if length <= allowed]


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
