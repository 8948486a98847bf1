"""The cache of a window keeps too few tokens."""

from contextlib import AbstractContextManager
from typing import Any

from transformers.cache_utils import DynamicSlidingWindowLayer

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import Fault, NotPossibleError, replaced
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    if not subject.cache or subject.window is None or subject.two_stacks or subject.ours:
        raise NotPossibleError("it has no window")
    own: Any = DynamicSlidingWindowLayer.__init__

    def wrong(self: Any, sliding_window: int, **more: Any) -> None:
        own(self, sliding_window - 2, **more)

    return replaced(DynamicSlidingWindowLayer, "__init__", wrong)


def claims(finding: Finding) -> bool:
    window: int | None = finding.evidence.get("window")
    if window is None:
        return False
    first = finding.evidence["gaps"].gt(1e-3).nonzero()
    begins = int(first[0]) + finding.evidence["first"]
    return begins >= window - 4 and finding.evidence.get("positions") in (None, right(finding))


def right(finding: Finding) -> list[int]:
    """The positions that all tokens should have."""
    return list(range(sum(finding.evidence["pieces"])))


FAULT = Fault(
    name="cache window",
    title="the cache of a window keeps too few tokens",
    tests=("cache",),
    diagnosis=(
        "The cache of a layer with a window drops keys that are still inside the window: decoding is right until "
        "the window is full."
    ),
    remedy="Keep window − 1 tokens before the new one.",
    claims=claims,
    inject=inject,
    also=("pieces", "crop"),
    threads=("https://github.com/ml-explore/mlx-lm/pull/390",),
)
