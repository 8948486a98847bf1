"""Windows on the wrong layers."""

from contextlib import AbstractContextManager
from typing import Any

from relpos.checking.faults.fault import Fault, NotPossibleError, code_of, replaced, together
from relpos.checking.report import Finding
from relpos.checking.subject import ModelSubject

SLIDING = ("create_sliding_window_causal_mask", "create_bidirectional_sliding_window_mask")
FULL = ("create_causal_mask", "create_bidirectional_mask")


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    windows = {layer.window for layer in subject.layers}
    code: Any = code_of(subject)
    swaps = [
        (one, other) for one, other in zip(SLIDING, FULL, strict=True) if hasattr(code, one) and hasattr(code, other)
    ]
    if len(windows) < 2 or not swaps:
        raise NotPossibleError("its layers are all of one type")
    contexts = []
    for one, other in swaps:
        contexts += [replaced(code, one, getattr(code, other)), replaced(code, other, getattr(code, one))]
    return together(*contexts)


def claims(finding: Finding) -> bool:
    reaches = finding.evidence["reaches"]
    limited = [reach for reach in reaches if reach.limited]
    full = [reach for reach in reaches if not reach.limited]
    return bool(limited and full) and all(
        [reach.measured > reach.expected for reach in limited] + [reach.measured < reach.expected for reach in full]
    )


FAULT = Fault(
    name="window layers",
    title="windows on the wrong layers",
    tests=("window",),
    diagnosis=(
        "The layers with a window see everything and those without one have it: the pattern of layer types is "
        "inverted or shifted."
    ),
    remedy=("Read the type of each layer from layer_types; mind whether the pattern counts layers from 0 or from 1."),
    claims=claims,
    inject=inject,
    also=("cache", "pieces", "crop", "static cache", "packing"),
)
