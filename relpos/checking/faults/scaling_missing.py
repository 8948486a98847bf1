"""The scaling of the rotation is not applied."""

from contextlib import AbstractContextManager

from torch import Tensor

from relpos.checking.faults.fault import ROTATED, Fault, NotPossibleError, with_frequencies, wrong_rotations
from relpos.checking.report import Finding
from relpos.checking.rotations import unscaled
from relpos.checking.subject import ModelSubject


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    plain = {}
    for layer in subject.layers:
        rotary = subject.known[layer.name].rotary
        if rotary is not None and rotary.scaling.get("rope_type", "default") not in ("default", "proportional"):
            plain[len(rotary.frequencies)] = unscaled(rotary).frequencies
    if not plain:
        raise NotPossibleError("its rotation is not scaled")

    def change(frequencies: Tensor, module: object, name: str) -> Tensor:
        return plain.get(len(frequencies), frequencies)

    return with_frequencies(subject, change)


def claims(finding: Finding) -> bool:
    for rotation in wrong_rotations(finding):
        expected = rotation.expected
        if expected is None or expected.scaling.get("rope_type", "default") == "default":
            return False
        if not rotation.explained(unscaled(expected), unscaled(expected)):
            return False
    return True


FAULT = Fault(
    name="scaling missing",
    title="the scaling of the rotation is not applied",
    tests=("rotation",),
    diagnosis=(
        "The configuration scales the rotation (linear, NTK, YaRN, Llama 3, …), and the frequencies that run are "
        "the unscaled ones."
    ),
    remedy=(
        "Read rope_type and its parameters from rope_parameters (before 5.0: rope_scaling) when the frequencies "
        "are computed."
    ),
    claims=claims,
    inject=inject,
    also=ROTATED,
    threads=(
        "https://github.com/Blaizzy/mlx-vlm/pull/1709",
        "https://github.com/lablup/mlxcel/issues/1340",
    ),
)
