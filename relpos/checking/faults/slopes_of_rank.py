"""Each half of the heads has the slopes of the first half."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import Fault, NotPossibleError, with_bias, wrong_biases
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    if "alibi" not in subject.kinds:
        raise NotPossibleError("it has no slopes")

    def change(bias: Tensor) -> Tensor:
        half = bias.shape[1] // 2
        return torch.cat([bias[:, :half], bias[:, :half]], 1)

    return with_bias(subject, change)


def claims(finding: Finding) -> bool:
    for bias in wrong_biases(finding):
        for ranks in (2, 4, 8):
            size, rest = divmod(len(bias.expected), ranks)
            if size and not rest and bias.explained(bias.expected[:size].repeat(ranks, 1)):
                break
        else:
            return False
    return True


FAULT = Fault(
    name="slopes of rank",
    title="each half of the heads has the slopes of the first half",
    tests=("bias",),
    diagnosis=(
        "The slopes are computed for the heads of one process and repeat: with tensor parallelism, ranks after "
        "the first need the later slopes."
    ),
    remedy="Compute the slopes for all heads and cut out those of this rank.",
    claims=claims,
    inject=inject,
    also=(),
    threads=(
        "https://github.com/bigscience-workshop/Megatron-DeepSpeed/issues/227",
        "https://github.com/flashinfer-ai/flashinfer/issues/1606",
    ),
)
