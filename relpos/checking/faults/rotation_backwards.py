"""Queries and keys are both rotated backwards."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import ROTATED, Fault, with_rotation, wrong_rotations
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    def wrong(function: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> Any:
        return function(q, k, cos, -sin, *rest, **more)

    return with_rotation(subject, wrong)


def claims(finding: Finding) -> bool:
    for rotation in wrong_rotations(finding):
        if rotation.expected is None:
            return False
        back = replace(rotation.expected, frequencies=-rotation.expected.frequencies)
        if not rotation.explained(back, back):
            return False
    return True


FAULT = Fault(
    name="rotation backwards",
    title="queries and keys are rotated by the negative angle",
    tests=("rotation",),
    diagnosis=(
        "Queries and keys are both rotated the wrong way round: the sine has the wrong sign, or the two parts of a "
        "pair are exchanged. A model that was trained so works, and no other checkpoint does."
    ),
    remedy="A pair (a, b) becomes (a·cos − b·sin, a·sin + b·cos): rotate_half is cat(−second half, first half).",
    claims=claims,
    inject=inject,
    also=ROTATED,
    threads=("https://github.com/karpathy/nanochat/pull/489",),
)
