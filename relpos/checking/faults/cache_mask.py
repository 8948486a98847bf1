"""The causal mask of a piece is aligned with the first keys."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import READS_MASK, Fault, NotPossibleError, additive, seen_before, with_inputs
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    reads_mask = subject.model.config.model_type in READS_MASK or not subject.only_attention
    reads_mask |= any(layer.layer_type == "chunked_attention" for layer in subject.layers)
    if not subject.cache or subject.two_stacks or subject.window is not None or reads_mask or subject.ours:
        raise NotPossibleError("it has no cache of all tokens, or makes its masks itself")

    def change(keywords: dict[str, Any]) -> None:
        seen, length = seen_before(keywords), keywords["input_ids"].shape[1]
        static = type(keywords.get("past_key_values")).__name__ == "StaticCache"
        if seen and length > 1 and not static:
            visible = torch.ones(length, seen + length, dtype=torch.bool).tril()
            keywords["attention_mask"] = additive(visible, next(subject.model.parameters()).dtype)

    return with_inputs(subject.model, change)


def claims(finding: Finding) -> bool:
    later = [visible for visible in finding.evidence["visible"] if 1 < visible.shape[0] < visible.shape[1]]
    return bool(later) and all(bool((visible.sum(-1) <= torch.arange(1, len(visible) + 1)).all()) for visible in later)


FAULT = Fault(
    name="cache mask",
    title="the causal mask of a piece is aligned with the first keys",
    tests=("pieces",),
    diagnosis=(
        "When several tokens are read with a cache, the causal mask begins at the first key and not at the end of "
        "the cache (is_causal=True of scaled_dot_product_attention is aligned to the top left)."
    ),
    remedy="Let query i of a piece see the keys up to cache length + i.",
    claims=claims,
    inject=inject,
    also=("crop",),
    threads=(
        "https://github.com/pytorch/pytorch/issues/144858",
        "https://github.com/pytorch/pytorch/issues/103082",
        "https://github.com/onnx/onnx/pull/8068",
    ),
)
