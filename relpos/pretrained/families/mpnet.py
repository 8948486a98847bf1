"""MPNet: T5's buckets in one table that all layers share, besides learned positions."""

from typing import Any

import torch
from torch import Tensor

from relpos.forms.bias import Toeplitz
from relpos.forms.call import Call
from relpos.pretrained.attention_interface import PositionBias, relpos_attention
from relpos.pretrained.families.t5_models import describe_buckets
from relpos.pretrained.layer_position import Adapter, LayerPosition, ModelLayer


def describe(layer: ModelLayer) -> LayerPosition | None:
    """The buckets, and the table that is added to the embedding."""
    added = layer.table()
    assert added is not None
    rows, first = added
    note = f"and learned positions, {rows.shape[0]:,} × {rows.shape[1]:,}, the first token has row {first}"
    return describe_buckets(layer, note, rows)


def compute_position_bias(self: Any, x: Tensor, position_ids: Tensor | None = None, num_buckets: int = 32) -> Any:
    """In place of `MPNetEncoder.compute_position_bias`."""
    if position_ids is not None:
        return type(self).compute_position_bias(self, x, position_ids, num_buckets)

    def bias(call: Call) -> Toeplitz:
        which = self.relative_position_bucket(-call.distances.to(torch.long), num_buckets=num_buckets)  # (distances,)
        return Toeplitz(self.relative_attention_bias(which).T.to(call.dtype), call.zero)

    return PositionBias(bias, 0)


def forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Any = None,
    position_bias: Any = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor]:
    """In place of `MPNetSelfAttention.forward`."""
    shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
    query, key, value = (project(hidden_states).view(shape).transpose(1, 2) for project in (self.q, self.k, self.v))
    out, _ = relpos_attention(
        self,
        query,
        key,
        value,
        attention_mask,
        scaling=self.attention_head_size**-0.5,
        dropout=self.dropout.p,
        is_causal=False,
        position_bias=position_bias,
        output_attentions=output_attentions,
    )
    return (self.o(out.flatten(2)),)


ADAPTER = Adapter(
    {"mpnet"},
    describe,
    {
        "modeling_mpnet.MPNetEncoder": {"compute_position_bias": compute_position_bias},
        "modeling_mpnet.MPNetSelfAttention": {"forward": forward},
    },
)
