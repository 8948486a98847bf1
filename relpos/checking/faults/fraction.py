"""Another number of dimensions is rotated."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import ROTATED, Fault, NotPossibleError, rotaries_of, with_rotation, wrong_rotations
from relpos.checking.findings import Finding
from relpos.checking.rotations import estimate


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    rotaries = rotaries_of(subject, pairs=2)
    if any(rotary.start for rotary in rotaries):
        raise NotPossibleError("it rotates the last dimensions")
    half, rotated = rotaries[0].layout == "half", rotaries[0].rotated

    def fewer(x: Tensor) -> Tensor:
        """Cosines or sines of half of the dimensions: every second frequency."""
        if x.shape[-1] < rotated:  # one value per pair
            return x[..., ::2]
        by_pair = x[..., : x.shape[-1] // 2] if half else x[..., ::2]
        chosen = by_pair[..., ::2]
        return torch.cat([chosen, chosen], -1) if half else chosen.repeat_interleave(2, -1)

    def wrong(function: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> Any:
        size = rotated // 2
        turned = function(q[..., :size], k[..., :size], fewer(cos), fewer(sin), *rest, **more)
        return tuple(torch.cat([x, whole[..., size:]], -1) for x, whole in zip(turned, (q, k), strict=True))

    return with_rotation(subject, wrong)


def claims(finding: Finding) -> bool:
    for rotation in wrong_rotations(finding):
        found = estimate(rotation.q, rotation.positions, rotation.expected)
        if rotation.expected is None or found is None or found.rotated == rotation.expected.rotated:
            return False
        if found.layout != rotation.expected.layout and found.rotated > 2:
            return False
    return True


FAULT = Fault(
    name="fraction",
    title="another number of dimensions is rotated",
    tests=("rotation",),
    diagnosis=(
        "Another share of each head is rotated than the configuration says: partial_rotary_factor (rotary_pct, "
        "rotary_dim) is ignored or applied where there is none."
    ),
    remedy=(
        "Rotate the first head_dim × partial_rotary_factor dimensions, and compute their frequencies over that number."
    ),
    claims=claims,
    inject=inject,
    also=ROTATED,
    threads=(
        "https://github.com/AI-Hypercomputer/maxtext/issues/4616",
        "https://github.com/vllm-project/vllm/pull/43770",
        "https://github.com/ml-explore/mlx-lm/pull/1698",
    ),
)
