"""Falcon: rotary, or ALiBi divided by √head_dim.

transformers' "eager" code adds ALiBi twice (in the mask and in the layer); its default, "sdpa", adds it once, as the
published Falcon did. We follow "sdpa".
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb, build_alibi_tensor

from relpos.pretrained.attention_interface import by_key, relpos_attention
from relpos.pretrained.families import rotary
from relpos.pretrained.layer_position import Adapter, LayerPosition, ModelLayer


def describe(layer: ModelLayer) -> LayerPosition | None:
    """The slopes of one layer, or its rotation."""
    if not layer.config.alibi:
        return rotary.describe(layer)
    values = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), layer.config.num_attention_heads, torch.float32)
    slopes = ((values[:, 0, 1] - values[:, 0, 0]) * layer.module.inv_norm_factor).float()
    return layer.alibi(slopes, "divided by √head_dim, rounded to bfloat16; padding is not counted")


def forward(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Any,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """In place of `FalconAttention.forward`; alibi is (batch × heads, 1, keys)."""
    query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
    batch, _, queries, _ = query.shape
    if alibi is None:
        assert position_embeddings is not None
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    bias = None if alibi is None else alibi.view(batch, self.num_heads, -1) * self.inv_norm_factor
    out, _ = relpos_attention(
        self,
        query,
        key,
        value,
        attention_mask,
        scaling=self.inv_norm_factor,
        dropout=0.0 if alibi is None else self.attention_dropout.p,  # with rotary their code drops nothing
        output_attentions=output_attentions,
        key_bias=None if bias is None else by_key(bias),
    )
    return self.dense(out.reshape(batch, queries, -1)), None


ADAPTER = Adapter({"falcon"}, describe, {"modeling_falcon.FalconAttention": {"forward": forward}})
