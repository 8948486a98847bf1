"""Padding is counted in the positions."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from relpos.checking.faults.fault import Fault, NotPossibleError, with_inputs
from relpos.checking.report import Finding
from relpos.checking.subject import ModelSubject


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    if (
        not subject.positions
        or not subject.causal
        or not subject.kinds & {"learned", "sinusoidal"}
        or subject.two_stacks
    ):
        raise NotPossibleError("its positions are not absolute")

    def change(keywords: dict[str, Any]) -> None:
        if keywords.get("attention_mask") is not None and not keywords["attention_mask"].bool().all():
            keywords["position_ids"] = torch.arange(keywords["input_ids"].shape[1])[None]

    return with_inputs(subject.model, change)


def claims(finding: Finding) -> bool:
    return bool(finding.evidence["absolute"]) and not finding.evidence["seen"]


FAULT = Fault(
    name="padding counted",
    title="padding is counted in the positions",
    tests=("left padding",),
    diagnosis=(
        "Padding on the left moves the positions of the text after it: positions are counted over the row and not "
        "over the tokens that count."
    ),
    remedy="position_ids = attention_mask.cumsum(-1) − 1.",
    claims=claims,
    inject=inject,
    also=(),
    threads=(
        "https://github.com/unslothai/unsloth/issues/3699",
        "https://github.com/ndif-team/nnsight/pull/673",
    ),
)
