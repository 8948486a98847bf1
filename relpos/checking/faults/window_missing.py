"""The window is ignored."""

from contextlib import AbstractContextManager
from typing import Any

from relpos.checking.faults.fault import Fault, NotPossibleError, code_of, replaced, together
from relpos.checking.report import Finding
from relpos.checking.subject import ModelSubject

SLIDING = ("create_sliding_window_causal_mask", "create_bidirectional_sliding_window_mask")
FULL = ("create_causal_mask", "create_bidirectional_mask")


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    code: Any = code_of(subject)
    pairs = [
        (one, other) for one, other in zip(SLIDING, FULL, strict=True) if hasattr(code, one) and hasattr(code, other)
    ]
    if subject.window is None or not pairs:
        raise NotPossibleError("it has no window")
    return together(*(replaced(code, one, getattr(code, other)) for one, other in pairs))


def claims(finding: Finding) -> bool:
    return all(reach.limited and reach.measured > reach.expected + 2 for reach in finding.evidence["wrong"])


FAULT = Fault(
    name="window missing",
    title="the window is ignored",
    tests=("window",),
    diagnosis=("A layer with a window sees the whole text: its numbers are right up to the window, and worse beyond."),
    remedy=(
        "Hand the window of the layer to the attention or to its mask; check that the implementation in use "
        "supports it."
    ),
    claims=claims,
    inject=inject,
    also=("cache", "pieces", "crop", "static cache", "packing"),
)
