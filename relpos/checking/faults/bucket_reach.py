"""The buckets reach to another distance."""

from contextlib import AbstractContextManager

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import Fault, with_buckets, wrong_biases
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    return with_buckets(
        subject, lambda own, relative, more: own(relative, **{**more, "max_distance": 8 * more["max_distance"]})
    )


def claims(finding: Finding) -> bool:
    near = []
    for bias in wrong_biases(finding):
        if not hasattr(bias.layer.config, "relative_attention_num_buckets"):
            return False
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
