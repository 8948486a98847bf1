"""Padding is seen."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import Fault, NotPossibleError, with_inputs
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    if not subject.padding or subject.two_stacks:
        raise NotPossibleError("it takes no mask")

    def change(keywords: dict[str, Any]) -> None:
        if keywords.get("attention_mask") is not None:
            keywords["attention_mask"] = torch.ones_like(keywords["attention_mask"])

    return with_inputs(subject.model, change)


def claims(finding: Finding) -> bool:
    return bool(finding.evidence["seen"])


FAULT = Fault(
    name="padding seen",
    title="padding is seen",
    tests=("left padding", "right padding"),
    diagnosis="Padding tokens are seen by the others: the attention mask does not reach the scores.",
    remedy="Hand attention_mask to the mask of every layer.",
    claims=claims,
    inject=inject,
    also=(),
    threads=(
        "https://github.com/turboderp/exllama/pull/101",
        "https://github.com/yg211/bert_nli/pull/3",
    ),
)
