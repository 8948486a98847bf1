"""Another theta."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import (
    ROTATED,
    Fault,
    NotPossibleError,
    rotaries_of,
    with_frequencies,
    wrong_rotations,
)
from relpos.checking.findings import Finding
from relpos.checking.rotations import estimate, theta_of


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    rotaries = rotaries_of(subject, pairs=2)  # no theta changes the first frequency
    if any(rotary.scaling.get("rope_type", "default") != "default" for rotary in rotaries):
        raise NotPossibleError("its rotation is scaled")
    thetas = {float(rotary.scaling.get("rope_theta", 10_000.0)) for rotary in rotaries}
    theta = 10_000.0 if 10_000.0 not in thetas else 500_000.0

    def change(frequencies: Tensor, module: Any, name: str) -> Tensor:
        return theta ** -(torch.arange(len(frequencies)) / len(frequencies))

    return with_frequencies(subject, change)


def claims(finding: Finding) -> bool:
    for rotation in wrong_rotations(finding):
        expected = rotation.expected
        found = estimate(rotation.q, rotation.positions, expected)
        theta = None if found is None else theta_of(found)
        if expected is None or found is None or theta is None:
            return False
        if (found.layout, found.rotated) != (expected.layout, expected.rotated):
            return False
    return True


FAULT = Fault(
    name="theta",
    title="another theta",
    tests=("rotation",),
    diagnosis=(
        "The frequencies are those of another theta than the configuration gives: often the default of 10,000, "
        "because rope_theta moved to rope_parameters."
    ),
    remedy="Read rope_theta from rope_parameters of the layer, not from the top of the configuration.",
    claims=claims,
    inject=inject,
    also=ROTATED,
    threads=(
        "https://github.com/THUDM/slime/pull/1720",
        "https://github.com/sgl-project/SpecForge/issues/265",
    ),
)
