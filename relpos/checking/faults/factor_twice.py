"""The attention factor of the scaling is applied twice."""

from contextlib import AbstractContextManager

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import Fault, has_factor, with_factor
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    return with_factor(subject, power=2)


def claims(finding: Finding) -> bool:
    return has_factor(finding, power=2)


FAULT = Fault(
    name="factor twice",
    title="the attention factor of the scaling is applied twice",
    tests=("attention factor",),
    diagnosis=(
        "The attention factor is applied twice, as in the cosines and again in the scale of the scores or in the "
        "config that already contains it."
    ),
    remedy="Multiply cosines and sines once by the attention factor (0.1 · ln(factor) + 1 for YaRN).",
    claims=claims,
    inject=inject,
    also=(),
    threads=("https://github.com/sgl-project/sglang/pull/33558",),
)
