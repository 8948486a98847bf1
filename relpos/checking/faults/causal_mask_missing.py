"""No causal mask."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import MASKED, Fault, NotPossibleError, with_mask
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    if not subject.causal:
        raise NotPossibleError("it is bidirectional")
    return with_mask(subject, lambda length: torch.ones(length, length, dtype=torch.bool))


def claims(finding: Finding) -> bool:
    seen: dict[str, Tensor] = finding.evidence.get("visible") or {}
    hidden = bool(seen) and not any(bool(visible.triu(1).any()) for visible in seen.values())
    return bool(finding.evidence.get("ahead", 0)) and not hidden


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
    also=MASKED,
    threads=(
        "https://github.com/keras-team/keras/issues/23038",
        "https://github.com/huggingface/candle/issues/3567",
        "https://github.com/facebookresearch/xformers/issues/103",
    ),
)
