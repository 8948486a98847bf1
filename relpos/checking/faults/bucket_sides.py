"""A bias of one direction for both, or of both for one."""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from relpos.checking.configured import LayerBias
from relpos.checking.faults.fault import Fault, NotPossibleError, replaced, together, wrong_biases
from relpos.checking.report import Finding
from relpos.checking.subject import ModelSubject
from relpos.encodings.t5 import bucket


def inject(subject: ModelSubject) -> AbstractContextManager[None]:
    owners = [layer.module for layer in subject.layers if hasattr(layer.module, "_relative_position_bucket")]
    owners = [owner for owner in owners if type(owner).__name__ not in ("UMT5Attention", "LongT5LocalAttention")]
    if not owners:
        raise NotPossibleError("it has no buckets")
    contexts = []
    for owner in owners:
        own: Any = owner._relative_position_bucket

        def wrong(relative: Tensor, own: Any = own, **more: Any) -> Any:
            return own(relative, **{**more, "bidirectional": not more["bidirectional"]})

        contexts.append(replaced(owner, "_relative_position_bucket", wrong))
    return together(*contexts)


def claims(finding: Finding) -> bool:
    for bias in wrong_biases(finding):
        table = with_buckets(bias)
        if table is None or not bias.explained(table):
            return False
    return True


def with_buckets(bias: LayerBias) -> Tensor | None:
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
