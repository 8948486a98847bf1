"""Only the first layer has the bias."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import Fault, NotPossibleError, together, with_inputs, wrong_biases
from relpos.checking.findings import Finding


def forget_bias(keywords: dict[str, Any]) -> None:
    """Zeros for the bias of the first layer, where it hides nothing."""
    bias = keywords.get("position_bias")
    if bias is not None:
        keywords["position_bias"] = bias.where(bias < torch.finfo(bias.dtype).min / 2, 0.0)


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    later = [
        layer.module
        for layer in subject.layers
        if layer.index > 0 and not getattr(layer.module, "has_relative_attention_bias", True)
    ]
    if not later:
        raise NotPossibleError("its layers do not share a bias")
    return together(*(with_inputs(module, forget_bias) for module in later))


def claims(finding: Finding) -> bool:
    wrong = wrong_biases(finding)
    return all(bias.layer.index > 0 and not bias.measured.abs().gt(1e-4).any() for bias in wrong)


FAULT = Fault(
    name="bias first layer",
    title="only the first layer has the bias",
    tests=("bias",),
    diagnosis=("The bias that all layers share reaches the first one only: it is computed there and not handed on."),
    remedy="Return position_bias from the first layer and give it to all others.",
    claims=claims,
    inject=inject,
    also=(),
    threads=("https://github.com/huggingface/transformers/issues/10221",),
)
