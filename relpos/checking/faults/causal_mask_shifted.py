"""The causal mask is off by one."""

from contextlib import AbstractContextManager

import torch

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import MASKED, Fault, NotPossibleError, with_mask
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    if not subject.causal:
        raise NotPossibleError("it is bidirectional")
    return with_mask(subject, lambda length: torch.ones(length, length, dtype=torch.bool).tril(1))


def claims(finding: Finding) -> bool:
    visible = finding.evidence.get("visible") or {}
    ahead = [int(seen.nonzero().diff(dim=1).max()) for seen in visible.values()]
    if ahead:
        return max(ahead) == 1
    return bool(finding.evidence.get("ahead", 0) == 1)


FAULT = Fault(
    name="causal mask shifted",
    title="the causal mask is off by one",
    tests=("causality",),
    diagnosis=(
        "Each query sees one token more than it may: the diagonal of the causal mask is off by one, and the model "
        "sees what it should predict."
    ),
    remedy="Hide keys j > i: torch.triu(mask, diagonal=1).",
    claims=claims,
    inject=inject,
    also=MASKED,
)
