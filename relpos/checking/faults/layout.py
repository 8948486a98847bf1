"""The pairs of dimensions that are turned together are those of the other layout."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import ROTATED, Fault, rotaries_of, with_rotation, wrong_rotations
from relpos.checking.findings import Finding


def paired(size: int, like_halves: bool) -> Tensor:
    """The order of dimensions in which neighbours come to lie in the two halves, or the other way round."""
    neighbours = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
    return neighbours if like_halves else neighbours.argsort()


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    rotaries = rotaries_of(subject, pairs=2)
    layouts, rotated = {rotary.layout for rotary in rotaries}, rotaries[0].rotated

    def wrong(function: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> Any:
        size = rotated
        order = paired(size, layouts == {"half"})

        def permuted(x: Tensor, by: Tensor) -> Tensor:
            return torch.cat([x[..., :size][..., by], x[..., size:]], -1)

        turned = function(permuted(q, order), permuted(k, order), cos, sin, *rest, **more)
        return tuple(permuted(x, order.argsort()) for x in turned)

    return with_rotation(subject, wrong)


def claims(finding: Finding) -> bool:
    for rotation in wrong_rotations(finding):
        if rotation.expected is None:
            return False
        other = replace(
            rotation.expected, layout="half" if rotation.expected.layout == "interleaved" else "interleaved"
        )
        if not rotation.explained(other, other):
            return False
    return True


FAULT = Fault(
    name="layout",
    title="the pairs of dimensions that are turned together are those of the other layout",
    tests=("rotation",),
    diagnosis=(
        "Neighbouring dimensions are rotated together where the checkpoint pairs the two halves of a head, or the "
        "other way round: right at position 0, worse with every token of distance."
    ),
    remedy=(
        "Use the layout of the checkpoint (rotate_half for half, neighbouring pairs for interleaved), or permute "
        "the rows of q_proj and k_proj when the weights are converted."
    ),
    claims=claims,
    inject=inject,
    also=ROTATED,
    threads=(
        "https://github.com/vllm-project/vllm-ascend/pull/12820",
        "https://github.com/EleutherAI/gpt-neox/issues/834",
        "https://github.com/ggml-org/llama.cpp/pull/13260",
    ),
)
