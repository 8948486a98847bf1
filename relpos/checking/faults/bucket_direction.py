"""Buckets of past and future are exchanged."""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from relpos.checking.configured import expected_bias
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
            return own(-relative, **more)

        contexts.append(replaced(owner, "_relative_position_bucket", wrong))
    return together(*contexts)


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
