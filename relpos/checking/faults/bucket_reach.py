"""The buckets reach to another distance."""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from relpos.checking.faults.fault import Fault, NotPossibleError, replaced, together, wrong_biases
from relpos.checking.report import Finding
from relpos.checking.subject import ModelSubject


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    owners = [layer.module for layer in subject.layers if hasattr(layer.module, "_relative_position_bucket")]
    owners = [owner for owner in owners if type(owner).__name__ not in ("UMT5Attention", "LongT5LocalAttention")]
    if not owners:
        raise NotPossibleError("it has no buckets")
    contexts = []
    for owner in owners:
        own: Any = owner._relative_position_bucket

        def wrong(relative: Tensor, own: Any = own, **more: Any) -> Any:
            return own(relative, **{**more, "max_distance": 8 * more["max_distance"]})

        contexts.append(replaced(owner, "_relative_position_bucket", wrong))
    return together(*contexts)


def claims(finding: Finding) -> bool:
    near = []
    for bias in wrong_biases(finding):
        gap = (bias.measured - bias.expected).abs().amax(0)
        exact = int(bias.layer.config.relative_attention_num_buckets) // 4
        close = bias.distances.abs() < exact
        near.append(bool((gap[close] < 1e-3 * float(bias.expected.abs().max())).all()))
    return all(near)


FAULT = Fault(
    name="bucket reach",
    title="the buckets reach to another distance",
    tests=("bias",),
    diagnosis=(
        "The logarithmic buckets end at another distance than relative_attention_max_distance: near tokens are "
        "right, far ones are not."
    ),
    remedy="Hand relative_attention_max_distance to the function of the buckets; its default is 128.",
    claims=claims,
    inject=inject,
    also=(),
)
