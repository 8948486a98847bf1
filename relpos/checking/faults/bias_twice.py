"""The bias is added twice."""

from contextlib import AbstractContextManager

from torch import Tensor

from relpos.checking.faults.fault import Fault, with_bias, wrong_biases
from relpos.checking.report import Finding
from relpos.checking.subject import ModelSubject


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    def change(bias: Tensor) -> Tensor:
        return 2 * bias

    return with_bias(subject, change)


def claims(finding: Finding) -> bool:
    return all(bias.explained(2 * bias.expected) for bias in wrong_biases(finding))


FAULT = Fault(
    name="bias twice",
    title="the bias is added twice",
    tests=("bias",),
    diagnosis="The bias is added twice, as in the mask and again in the layer.",
    remedy="Add it in one place only.",
    claims=claims,
    inject=inject,
    also=(),
)
