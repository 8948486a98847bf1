"""Buckets of past and future are exchanged."""

from contextlib import AbstractContextManager

from relpos.checking.check_subject import ModelSubject
from relpos.checking.configured import expected_bias
from relpos.checking.faults.fault import Fault, with_buckets, wrong_biases
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    return with_buckets(subject, lambda own, relative, more: own(-relative, **more))


def claims(finding: Finding) -> bool:
    for bias in wrong_biases(finding):
        flipped = expected_bias(bias.layer, "buckets", -bias.distances)
        if flipped is None or not bias.explained(flipped):
            return False
    return True


FAULT = Fault(
    name="bucket direction",
    title="buckets of past and future are exchanged",
    tests=("bias",),
    diagnosis=(
        "The buckets of a bidirectional bias serve the wrong direction: key minus query is taken for query minus key."
    ),
    remedy=("T5's relative position is key − query; positive ones, the future, have the second half of the buckets."),
    claims=claims,
    inject=inject,
    also=(),
)
