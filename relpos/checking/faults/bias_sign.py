"""The bias has the opposite sign."""

from contextlib import AbstractContextManager

from torch import Tensor

from relpos.checking.faults.fault import Fault, with_bias, wrong_biases
from relpos.checking.report import Finding
from relpos.checking.subject import ModelSubject


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    def change(bias: Tensor) -> Tensor:
        return -bias

    return with_bias(subject, change)


def claims(finding: Finding) -> bool:
    return all(bias.explained(-bias.expected) for bias in wrong_biases(finding))


FAULT = Fault(
    name="bias sign",
    title="the bias has the opposite sign",
    tests=("bias",),
    diagnosis=(
        "The bias is subtracted where it should be added, or distances are counted from the key to the query: far "
        "tokens get more weight."
    ),
    remedy="ALiBi is −slope · (i − j) for query i and key j.",
    claims=claims,
    inject=inject,
    also=(),
)
