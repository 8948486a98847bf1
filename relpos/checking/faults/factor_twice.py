"""The attention factor of the scaling is applied twice."""

from contextlib import AbstractContextManager

from relpos.checking.faults.fault import Fault, NotPossibleError, replaced, rotary_modules, together
from relpos.checking.report import Finding
from relpos.checking.subject import ModelSubject


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    factors = {position.rotary.factor for position in subject.known.values() if position.rotary is not None}
    if factors == {1.0}:
        raise NotPossibleError("its rotation has no factor")
    known = subject.known  # read before the model is changed
    assert known
    return together(
        *(
            replaced(module, name, getattr(module, name) ** 2)
            for module in rotary_modules(subject)
            for name in list(vars(module))
            if name.endswith("attention_scaling")
        )
    )


def claims(finding: Finding) -> bool:
    factor, expected = finding.evidence["factor"], finding.evidence["expected"]
    return bool(abs(factor - expected**2) < 0.005 * expected and expected != 1.0)


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
