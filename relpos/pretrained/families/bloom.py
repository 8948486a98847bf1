"""BLOOM: ALiBi as one number per head and key, counted over the tokens that are not padding."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from relpos.pretrained.attention_interface import by_key, relpos_attention
from relpos.pretrained.layer_position import Adapter, LayerPosition, ModelLayer


def describe(layer: ModelLayer) -> LayerPosition:
    """The slopes of one layer."""
    values = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), layer.config.num_attention_heads, torch.float32)
    return layer.alibi(values[:, 0, 1] - values[:, 0, 0], "padding is not counted")


def forward(
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Any,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """In place of `BloomAttention.forward`; alibi is (batch × heads, 1, keys)."""
    batch, queries, _ = hidden_states.shape
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    out, _ = relpos_attention(
        self,
        query,
        key,
        value,
        attention_mask,
        scaling=self.inv_norm_factor,
        dropout=self.attention_dropout.p,
        output_attentions=output_attentions,
        key_bias=by_key(alibi.view(batch, self.num_heads, -1)),
    )
    context = out.reshape(batch, queries, -1)
    if self.pretraining_tp > 1 and self.slow_but_exact:
        parts = self.pretraining_tp
        slices = zip(context.chunk(parts, dim=-1), self.dense.weight.chunk(parts, dim=-1), strict=True)
        projected = torch.stack([F.linear(part, weight) for part, weight in slices]).sum(0)
    else:
        projected = self.dense(context)
    return residual + F.dropout(projected, p=self.hidden_dropout, training=self.training), None


ADAPTER = Adapter({"bloom"}, describe, {"modeling_bloom.BloomAttention": {"forward": forward}})
