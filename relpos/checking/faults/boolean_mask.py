"""A boolean mask is added to the scores."""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from relpos.checking.capture import HIDDEN
from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import MASKED, Fault, NotPossibleError, with_function
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    if subject.model.config._attn_implementation != "eager":
        raise NotPossibleError("its attention does not add masks")

    def wrong(
        function: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *a: Any, **b: Any
    ) -> Any:
        return function(module, q, k, v, None if mask is None else mask > HIDDEN, *a, **b)

    return with_function(subject, ("eager_attention_forward",), wrong)


def claims(finding: Finding) -> bool:
    return True


FAULT = Fault(
    name="boolean mask",
    title="a boolean mask is added to the scores",
    tests=("mask",),
    diagnosis=(
        "A boolean mask is added to the scores: True adds 1 and False adds 0, so that nothing is hidden. Masks of "
        "scaled_dot_product_attention are boolean, those of most other code are numbers."
    ),
    remedy="Make numbers of it: torch.where(mask, 0.0, −inf); or scores.masked_fill(~mask, −inf).",
    claims=claims,
    inject=inject,
    also=("causality", *MASKED),
    threads=(
        "https://github.com/vllm-project/speculators/pull/691",
        "https://github.com/huggingface/transformers/pull/41443",
        "https://github.com/open-mmlab/mmdetection/issues/12351",
    ),
)
