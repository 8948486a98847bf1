"""Packed documents see each other."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from relpos.checking.faults.fault import Fault, NotPossibleError, with_inputs
from relpos.checking.fingerprints import separates_documents
from relpos.checking.report import Finding
from relpos.checking.subject import ModelSubject


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    promised = subject.positions and separates_documents(subject) and subject.only_attention
    if not promised or not subject.causal or subject.two_stacks:
        raise NotPossibleError("it does not separate documents by positions")

    def change(keywords: dict[str, Any]) -> None:
        positions = keywords.get("position_ids")
        if positions is not None and positions.shape[1] > 3 and keywords.get("attention_mask") is None:
            keywords["attention_mask"] = torch.ones_like(keywords["input_ids"])

    return with_inputs(subject.model, change)


def claims(finding: Finding) -> bool:
    first = int(finding.evidence["gaps"].gt(1e-3).nonzero()[0])
    return bool(first == finding.evidence["border"])


FAULT = Fault(
    name="packing leak",
    title="packed documents see each other",
    tests=("packing",),
    diagnosis=("The second document in a row sees the first: position_ids that begin again do not reach the mask."),
    remedy=(
        "Make the mask block diagonal (transformers: hand position_ids to create_causal_mask, and no "
        "attention_mask of ones)."
    ),
    claims=claims,
    inject=inject,
    also=(),
    threads=(
        "https://github.com/huggingface/nanoVLM/pull/204",
        "https://github.com/alex-hh/profam/issues/495",
    ),
)
