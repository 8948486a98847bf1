"""Queries and keys are rotated in opposite directions."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor

from relpos.checking.faults.fault import ROTATED, Fault, with_rotation, wrong_rotations
from relpos.checking.report import Finding
from relpos.checking.subject import ModelSubject


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    def wrong(function: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> Any:
        return function(q, k, cos, sin, *rest, **more)[0], function(q, k, cos, -sin, *rest, **more)[1]

    return with_rotation(subject, wrong)


def claims(finding: Finding) -> bool:
    for rotation in wrong_rotations(finding)[:1]:  # the content of later layers depends on the position
        expected = rotation.expected
        if expected is None:
            return False
        back = replace(expected, frequencies=-expected.frequencies)
        if not (rotation.explained(expected, back) or rotation.explained(back, expected)):
            return False
    return True


FAULT = Fault(
    name="keys backwards",
    title="queries and keys are rotated in opposite directions",
    tests=("rotation",),
    diagnosis=(
        "Keys are rotated by the negative angle of the queries: scores depend on the sum of two positions, not on "
        "their difference."
    ),
    remedy="Use the same sign of the sine for queries and keys.",
    claims=claims,
    inject=inject,
    also=ROTATED,
)
