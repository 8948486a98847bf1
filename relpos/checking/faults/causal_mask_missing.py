"""No causal mask."""

from contextlib import AbstractContextManager

import torch

from relpos.checking.faults.fault import Fault, NotPossibleError, with_mask
from relpos.checking.report import Finding
from relpos.checking.subject import ModelSubject


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    if not subject.causal:
        raise NotPossibleError("it is bidirectional")
    return with_mask(subject, lambda length: torch.ones(length, length, dtype=torch.bool))


def claims(finding: Finding) -> bool:
    return bool(finding.evidence.get("ahead", 0))


FAULT = Fault(
    name="causal mask missing",
    title="no causal mask",
    tests=("causality",),
    diagnosis=(
        "Queries see the tokens after them: the causal mask is missing, or is one that the attention does not "
        "understand."
    ),
    remedy=(
        "Give attention a causal mask (is_causal=True), and check the kind of mask it expects: a boolean added to "
        "scores hides nothing."
    ),
    claims=claims,
    inject=inject,
    also=("cache", "pieces", "crop", "static cache", "left padding", "right padding", "packing", "window"),
)
