"""Sinks are dropped."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from relpos.checking.faults.fault import Fault, NotPossibleError, during
from relpos.checking.report import Finding
from relpos.checking.subject import ModelSubject


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    layers = [layer.module for layer in subject.layers if getattr(layer.module, "sinks", None) is not None]
    if not layers:
        raise NotPossibleError("it has no sinks")

    def empty(module: Any) -> Any:
        before = module.sinks.data
        module.sinks.data = torch.full_like(before, -1e4)
        return before

    return during(layers, empty, lambda module, before: setattr(module.sinks, "data", before))


def claims(finding: Finding) -> bool:
    return bool(finding.evidence["dead"])


FAULT = Fault(
    name="sinks missing",
    title="sinks are dropped",
    tests=("sinks",),
    diagnosis=(
        "The checkpoint has a learned sink per head, and the softmax does not have it: all weights are too large."
    ),
    remedy=(
        "Add the sinks to the denominator of the softmax; use an attention implementation that takes them (s_aux)."
    ),
    claims=claims,
    inject=inject,
    also=(),
    threads=("https://github.com/vllm-project/vllm-metal/pull/550",),
)
