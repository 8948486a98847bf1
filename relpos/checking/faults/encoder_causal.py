"""An encoder has a causal mask."""

from contextlib import AbstractContextManager

import torch

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import Fault, NotPossibleError, with_mask
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    if subject.causal is not False:
        raise NotPossibleError("it is causal")
    return with_mask(subject, lambda length: torch.ones(length, length, dtype=torch.bool).tril())


def claims(finding: Finding) -> bool:
    return "ahead" not in finding.evidence


FAULT = Fault(
    name="encoder causal",
    title="an encoder has a causal mask",
    tests=("causality",),
    diagnosis="A bidirectional encoder sees no later tokens: it runs with the causal mask of a decoder.",
    remedy="Give it a bidirectional mask (is_causal=False, is_decoder=False).",
    claims=claims,
    inject=inject,
    also=("right padding", "window"),
    threads=(
        "https://github.com/sgl-project/sglang/pull/35434",
        "https://github.com/huggingface/transformers/issues/46077",
        "https://github.com/huggingface/transformers/pull/42820",
    ),
)
