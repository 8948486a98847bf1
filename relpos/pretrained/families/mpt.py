"""MPT: ALiBi with slopes of its own, as one number per head and key of the longest length; padding does not count."""

from typing import Any

from torch import Tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from relpos.pretrained.attention_interface import by_key, relpos_attention
from relpos.pretrained.layer_position import Adapter, LayerPosition, ModelLayer


def describe(layer: ModelLayer) -> LayerPosition:
    """The slopes of one layer."""
    values = build_mpt_alibi_tensor(layer.config.num_attention_heads, 2)
    return layer.alibi((values[:, 0, 1] - values[:, 0, 0]).float(), "padding is counted")


def forward(
    self: Any,
    hidden_states: Tensor,
    position_bias: Tensor | None,
    past_key_values: Any = None,
    attention_mask: Any = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """In place of `MptAttention.forward`; position_bias is (heads, 1, longest length)."""
    batch, queries, _ = hidden_states.shape
    projected = self.Wqkv(hidden_states)
    if self.clip_qkv:
        projected = projected.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (
        part.reshape(batch, queries, self.n_heads, self.head_dim).transpose(1, 2) for part in projected.chunk(3, dim=2)
    )
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    bias = None if position_bias is None else position_bias[None, :, 0, -key.shape[2] :]  # (1, heads, keys)
    out, _ = relpos_attention(
        self,
        query,
        key,
        value,
        attention_mask,
        scaling=self.softmax_scale,
        dropout=self.attn_dropout_p,
        output_attentions=output_attentions,
        key_bias=None if bias is None else by_key(bias),
    )
    return self.out_proj(out.reshape(batch, queries, -1)), None


ADAPTER = Adapter({"mpt"}, describe, {"modeling_mpt.MptAttention": {"forward": forward}})
