"""A linear scaling is applied the wrong way round."""

from contextlib import AbstractContextManager
from dataclasses import replace

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


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    scalings = [rotary.scaling for rotary in rotaries_of(subject)]
    if any(scaling.get("rope_type") != "linear" for scaling in scalings):
        raise NotPossibleError("its rotation is not scaled linearly")
    factor = float(scalings[0]["factor"])
    return with_frequencies(subject, lambda frequencies, module, name: frequencies * factor**2)


def claims(finding: Finding) -> bool:
    for rotation in wrong_rotations(finding):
        expected = rotation.expected
        factor = None if expected is None else expected.scaling.get("factor")
        if expected is None or not factor:
            return False
        inverted = replace(expected, frequencies=expected.frequencies * float(factor) ** 2)
        if not rotation.explained(inverted, inverted):
            return False
    return True


FAULT = Fault(
    name="scaling inverted",
    title="a linear scaling is applied the wrong way round",
    tests=("rotation",),
    diagnosis=(
        "Frequencies are multiplied by the factor of the scaling where they should be divided, as if positions "
        "were stretched."
    ),
    remedy="Divide the frequencies (or the positions) by the factor.",
    claims=claims,
    inject=inject,
    also=ROTATED,
)
