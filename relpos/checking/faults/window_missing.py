"""The window is ignored."""

from contextlib import AbstractContextManager

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import Fault, NotPossibleError, our_parts, replaced, together, with_exchanged_masks
from relpos.checking.findings import Finding
from relpos.encodings.window import Window


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    if subject.window is None:
        raise NotPossibleError("it has no window")
    if subject.ours:
        return together(*(replaced(part, "size", subject.length) for part in our_parts(subject, Window)))
    return with_exchanged_masks(subject, sliding=True, full=False)


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
    threads=("https://github.com/proger/hippogriff/issues/7",),
)
