"""Only the first layer has the bias."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from relpos.checking.faults.fault import Fault, NotPossibleError, together, wrong_biases
from relpos.checking.report import Finding
from relpos.checking.subject import ModelSubject


@contextlib.contextmanager
def without(module: Any) -> Iterator[None]:
    """A layer that gets zeros for the bias of the first one."""

    def hook(_: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        if keywords.get("position_bias") is not None:
            lowest = torch.finfo(keywords["position_bias"].dtype).min / 2
            bias = keywords["position_bias"]
            keywords = {**keywords, "position_bias": bias.where(bias < lowest, 0.0)}
        return arguments, keywords

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    later = [
        layer.module
        for layer in subject.layers
        if layer.index > 0 and not getattr(layer.module, "has_relative_attention_bias", True)
    ]
    if not later:
        raise NotPossibleError("its layers do not share a bias")
    return together(*(without(module) for module in later))


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
