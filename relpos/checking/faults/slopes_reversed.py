"""The slopes are in reverse order."""

from contextlib import AbstractContextManager

from torch import Tensor

from relpos.checking.faults.fault import Fault, NotPossibleError, with_bias, wrong_biases
from relpos.checking.report import Finding
from relpos.checking.subject import ModelSubject


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    if "alibi" not in subject.kinds:
        raise NotPossibleError("it has no slopes")

    def change(bias: Tensor) -> Tensor:
        return bias.flip(1)

    return with_bias(subject, change)


def claims(finding: Finding) -> bool:
    return all(bias.explained(bias.expected.flip(0)) for bias in wrong_biases(finding))


FAULT = Fault(
    name="slopes reversed",
    title="the slopes are in reverse order",
    tests=("bias",),
    diagnosis=(
        "The heads have the slopes of ALiBi in reverse order: the head with the steepest slope has the flattest one."
    ),
    remedy="The first head has the steepest slope, 2^(−8/heads).",
    claims=claims,
    inject=inject,
    also=(),
)
