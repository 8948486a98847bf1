"""The attention factor of the scaling is missing."""

from contextlib import AbstractContextManager

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import Fault, has_factor, with_factor
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    return with_factor(subject, power=0)


def claims(finding: Finding) -> bool:
    return has_factor(finding, power=0)


FAULT = Fault(
    name="factor missing",
    title="the attention factor of the scaling is missing",
    tests=("attention factor",),
    diagnosis=(
        "Cosines and sines lack the attention factor of YaRN or LongRoPE, so that all scores are too small; the "
        "loss hardly shows it."
    ),
    remedy="Multiply cosines and sines once by the attention factor (0.1 · ln(factor) + 1 for YaRN).",
    claims=claims,
    inject=inject,
    also=(),
    threads=(
        "https://github.com/turboderp-org/exllamav3/issues/259",
        "https://github.com/vllm-project/vllm/pull/46280",
    ),
)
