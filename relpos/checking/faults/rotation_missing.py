"""Queries and keys are not rotated."""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from relpos.checking.faults.fault import ROTATED, Fault, with_rotation, wrong_rotations
from relpos.checking.report import Finding
from relpos.checking.subject import ModelSubject


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    def wrong(function: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> Any:
        factor = (cos.square() + sin.square()).sqrt()
        return function(q, k, factor, sin * 0, *rest, **more)

    return with_rotation(subject, wrong)


def claims(finding: Finding) -> bool:
    return all(
        rotation.expected is not None and rotation.explained(None, None) for rotation in wrong_rotations(finding)
    )


FAULT = Fault(
    name="rotation missing",
    title="queries and keys are not rotated",
    tests=("rotation",),
    diagnosis=(
        "A layer that the configuration rotates does not rotate: it cannot tell the order of the tokens it sees."
    ),
    remedy="Apply the rotation in this layer; look for an inverted no_rope_layers or use_rope flag.",
    claims=claims,
    inject=inject,
    also=ROTATED,
    threads=("https://github.com/huggingface/transformers/issues/43756",),
)
