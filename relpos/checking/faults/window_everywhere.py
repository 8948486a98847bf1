"""Layers without a window have one."""

from contextlib import AbstractContextManager

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import Fault, with_exchanged_masks
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    return with_exchanged_masks(subject, sliding=False, full=True)


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
    threads=(
        "https://github.com/vllm-project/vllm/pull/21863",
        "https://github.com/huggingface/transformers/issues/38002",
    ),
)
