"""ALiBi as one number per head and key, outside transformers' interface: BLOOM, Falcon (where it is not rotary), MPT.

transformers' "eager" code of Falcon adds ALiBi twice (in the mask and in the layer); its default, "sdpa", adds it once,
as the published Falcon did. We follow "sdpa".
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from relpos.models.attention_interface import by_key, relpos_attention
from relpos.pretrained.families import rotary
from relpos.pretrained.layer_position import Adapter, LayerPosition, ModelLayer

NOTES = {
    "bloom": "padding is not counted",
    "falcon": "divided by √head_dim, rounded to bfloat16; padding is not counted",
    "mpt": "padding is counted",
}


def describe(layer: ModelLayer) -> LayerPosition | None:
    """The slopes of one layer: what the scores of each head lose per token of distance; or Falcon's rotation."""
    family, heads = layer.model_type, layer.config.num_attention_heads
    if family == "falcon" and not layer.config.alibi:
        return rotary.describe(layer)
    if family == "mpt":
        values = build_mpt_alibi_tensor(heads, 2)
    else:
        build = {"bloom": modeling_bloom, "falcon": modeling_falcon}[family].build_alibi_tensor
        values = build(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)
    slopes: Tensor = values[:, 0, 1] - values[:, 0, 0]
    if family == "falcon":
        slopes = slopes * layer.module.inv_norm_factor
    slopes = slopes.float()

    def bias(length: int) -> Tensor:
        return -slopes[:, None] * torch.arange(1 - length, length)

    words = f"ALiBi, slopes {slopes.max():.3g} to {slopes.min():.3g}; {NOTES[family]}"
    return layer.position("alibi", words, bias=bias)


def bloom_forward(
    self: Any,
    states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Any,
    layer_past: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """In place of `BloomAttention.forward`; alibi is (batch × heads, 1, keys)."""
    query, key, value = self._reshape(self.query_key_value(states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    kwargs |= {"scaling": self.inv_norm_factor, "dropout": self.attention_dropout.p}
    bias = by_key(alibi.view(len(states), self.num_heads, -1))
    context = relpos_attention(self, query, key, value, attention_mask, key_bias=bias, **kwargs)[0].flatten(2)
    if self.pretraining_tp > 1 and self.slow_but_exact:
        parts = self.pretraining_tp
        slices = zip(context.chunk(parts, dim=-1), self.dense.weight.chunk(parts, dim=-1), strict=True)
        projected = torch.stack([F.linear(part, weight) for part, weight in slices]).sum(0)
    else:
        projected = self.dense(context)
    return residual + F.dropout(projected, p=self.hidden_dropout, training=self.training), None


def falcon_forward(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Any,
    layer_past: Any = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """In place of `FalconAttention.forward`; alibi is (batch × heads, 1, keys)."""
    query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
    kwargs |= {"scaling": self.inv_norm_factor, "dropout": 0.0}  # with rotary their code drops nothing
    if alibi is None:
        assert position_embeddings is not None
        query, key = modeling_falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        bias = by_key(alibi.view(len(hidden_states), self.num_heads, -1) * self.inv_norm_factor)
        kwargs |= {"key_bias": bias, "dropout": self.attention_dropout.p}
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    out, _ = relpos_attention(self, query, key, value, attention_mask, **kwargs)
    return self.dense(out.flatten(2)), None


def mpt_forward(
    self: Any,
    hidden_states: Tensor,
    position_bias: Tensor | None,
    past_key_values: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """In place of `MptAttention.forward`; position_bias is (heads, 1, longest length)."""
    projected = self.Wqkv(hidden_states)
    if self.clip_qkv:
        projected = projected.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (x.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for x in projected.chunk(3, dim=2))
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    kwargs |= {"scaling": self.softmax_scale, "dropout": self.attn_dropout_p}
    if position_bias is not None:
        kwargs["key_bias"] = by_key(position_bias[None, :, 0, -key.shape[2] :])  # (1, heads, keys)
    out, _ = relpos_attention(self, query, key, value, attention_mask, **kwargs)
    return self.out_proj(out.flatten(2)), None


ADAPTER = Adapter(
    NOTES.keys(),
    describe,
    {
        "modeling_bloom.BloomAttention": {"forward": bloom_forward},
        "modeling_falcon.FalconAttention": {"forward": falcon_forward},
        "modeling_mpt.MptAttention": {"forward": mpt_forward},
    },
)
