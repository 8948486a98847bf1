"""A bias of one direction for both, or of both for one."""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from relpos.checking.check_subject import ModelSubject
from relpos.checking.configured import LayerBias
from relpos.checking.faults.fault import Fault, with_buckets, wrong_biases
from relpos.checking.findings import Finding
from relpos.encodings.t5 import bucket


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    return with_buckets(
        subject, lambda own, relative, more: own(relative, **{**more, "bidirectional": not more["bidirectional"]})
    )


def claims(finding: Finding) -> bool:
    for bias in wrong_biases(finding):
        table = table_of_the_other_kind(bias)
        if table is None or not bias.explained(table):
            return False
    return True


def table_of_the_other_kind(bias: LayerBias) -> Tensor | None:
    """The bias with the buckets of the other kind of layer."""
    owners = [module for module in bias.layer.part.modules() if hasattr(module, "relative_attention_bias")]
    if not owners:
        return None
    owner: Any = bias.layer.module if bias.layer.module in owners else owners[0]
    table: Tensor = owner.relative_attention_bias.weight.detach().double()
    causal = bool(getattr(bias.layer.module, "is_decoder", False))
    reach = int(bias.layer.config.relative_attention_max_distance)
    return table[bucket(bias.distances.long(), not causal, len(table), reach)].T


FAULT = Fault(
    name="bucket sides",
    title="a bias of one direction for both, or of both for one",
    tests=("bias",),
    diagnosis=(
        "The buckets are those of a causal decoder in an encoder, or the other way round: bidirectional is set wrongly."
    ),
    remedy="bidirectional = not is_decoder.",
    claims=claims,
    inject=inject,
    also=(),
)
