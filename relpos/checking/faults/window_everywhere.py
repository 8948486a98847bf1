"""Layers without a window have one."""

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
    if len({layer.window for layer in subject.layers}) < 2 or not pairs:
        raise NotPossibleError("its layers are all of one type")
    return together(*(replaced(code, other, getattr(code, one)) for one, other in pairs))


def claims(finding: Finding) -> bool:
    return all(not reach.limited and reach.measured < reach.expected - 2 for reach in finding.evidence["wrong"])


FAULT = Fault(
    name="window everywhere",
    title="layers without a window have one",
    tests=("window",),
    diagnosis=("Layers that should see the whole text have the window of the others: what lies farther back is lost."),
    remedy=("Give the window only to the layers whose type is sliding_attention; use_sliding_window=False means none."),
    claims=claims,
    inject=inject,
    also=("cache", "pieces", "crop", "static cache", "packing"),
)
