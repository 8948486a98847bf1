"""The bias is scaled with the scores."""

from contextlib import AbstractContextManager

from torch import Tensor

from relpos.checking.check_subject import ModelSubject
from relpos.checking.faults.fault import Fault, with_bias, wrong_biases
from relpos.checking.findings import Finding


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    size = subject.layers[0].config
    head_dim = int(getattr(size, "d_kv", None) or size.hidden_size // size.num_attention_heads)

    def change(bias: Tensor) -> Tensor:
        return bias * float(head_dim**-0.5)

    return with_bias(subject, change)


def claims(finding: Finding) -> bool:
    for bias in wrong_biases(finding):
        ratio = float((bias.measured * bias.expected).sum() / bias.expected.square().sum())
        if ratio <= 0.01 or abs(ratio - 1) < 0.05 or not bias.explained(ratio * bias.expected):
            return False
    return True


FAULT = Fault(
    name="bias scaled",
    title="the bias is scaled with the scores",
    tests=("bias",),
    diagnosis=(
        "The bias is multiplied by a factor, most often by 1/√head_dim: it is added before the scores are scaled."
    ),
    remedy="Add the bias after the scores are scaled (T5 does not scale scores at all).",
    claims=claims,
    inject=inject,
    also=(),
    threads=(
        "https://github.com/tenstorrent/tt-metal/pull/56406",
        "https://github.com/NVIDIA/OpenSeq2Seq/pull/76",
    ),
)
