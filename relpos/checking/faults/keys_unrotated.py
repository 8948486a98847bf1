"""Only the queries are rotated."""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import ROTATED, Fault, with_rotation, wrong_rotations
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    def wrong(function: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> Any:
        factor = (cos.square() + sin.square()).sqrt()
        still = function(q, k, factor, sin * 0, *rest, **more)[1]  # in the order of dimensions that the model makes
        return function(q, k, cos, sin, *rest, **more)[0], still

    return with_rotation(subject, wrong)


def claims(finding: Finding) -> bool:
    return all(
        rotation.expected is not None
        and (rotation.explained(rotation.expected, None) or rotation.explained(None, rotation.expected))
        for rotation in wrong_rotations(finding)[:1]  # the content of later layers depends on the position
    )


FAULT = Fault(
    name="keys unrotated",
    title="only the queries are rotated",
    tests=("rotation",),
    diagnosis=(
        "The keys reach attention without their rotation (or the queries do): scores depend on the absolute "
        "position of one of the two."
    ),
    remedy="Rotate both, and rotate keys before they are put into the cache.",
    claims=claims,
    inject=inject,
    also=ROTATED,
    threads=("https://github.com/kvcache-ai/sglang/pull/66",),
)
