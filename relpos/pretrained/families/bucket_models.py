"""T5-style models, and MPNet: one learned value per head and bucket of distances, added to the scores.

On ours, the bias is a form in place of the tensor that their layers pass to each other. T5's layers call `compute_bias`
where they have a table and make zeros where they have none; on ours all call it. The buckets and the table stay the
model's own, so that gradients reach its parameter.
"""

from typing import Any

import torch
from torch import Tensor

from relpos.forms.bias import Toeplitz
from relpos.forms.call import Call
from relpos.models.attention_interface import PositionBias, by_heads, relpos_attention
from relpos.pretrained.layer_position import Adapter, LayerPosition, ModelLayer


def describe(layer: ModelLayer) -> LayerPosition | None:
    """The buckets of one layer, from its own table or from the one that its stack shares; None without a table."""
    owners = [module for module in layer.part.modules() if hasattr(module, "relative_attention_bias")]
    if not owners:
        return None
    owner: Any = layer.module if layer.module in owners else owners[0]
    reach = getattr(owner, "relative_attention_max_distance", 128)  # MPNet has no entry for it
    words = [
        f"T5 buckets: {owner.relative_attention_bias.num_embeddings}, up to distance {reach:,}",
        "one table for all layers" if len(owners) == 1 else "a table per layer",
    ]
    rows = None
    if layer.model_type == "mpnet":
        assert layer.table is not None
        rows, first = layer.table
        words.append(f"and learned positions, {len(rows):,} × {rows.shape[1]:,}, the first token has row {first}")
    else:
        words.append("scores are not scaled")
    if hasattr(layer.module, "block_len"):  # LongT5's encoder
        words.append(f"blocks of {layer.module.block_len} tokens and their neighbours")

    def bias(length: int) -> Tensor:
        distances = torch.arange(1 - length, length, device=owner.relative_attention_bias.weight.device)
        return values(owner, distances).detach()

    return layer.position("buckets", "; ".join(words), table=rows, bias=bias)


def values(owner: Any, distances: Tensor) -> Tensor:
    """The values of a table at some distances, query minus key: (heads, distances)."""
    relative = -distances.long()
    if hasattr(owner, "relative_position_bucket"):  # MPNet
        buckets = owner.relative_position_bucket(relative)
    elif type(owner).__name__ == "UMT5Attention":
        buckets = owner._relative_position_bucket(relative)
    else:
        buckets = owner._relative_position_bucket(
            relative,
            bidirectional=not getattr(owner, "is_decoder", True),  # Pix2Struct's are decoders
            num_buckets=owner.relative_attention_num_buckets,
            max_distance=owner.relative_attention_max_distance,
        )
    by_head: Tensor = owner.relative_attention_bias(buckets).T
    return by_head


def bucket_bias(owner: Any, start: int) -> PositionBias:
    """The bias of a table, for queries from `start` on."""

    def bias(call: Call) -> Toeplitz:
        return Toeplitz(values(owner, call.distances).to(call.dtype), call.zero)

    return PositionBias(bias, start)


def compute_bias(self: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0) -> Any:
    """In place of the method of T5's layers."""
    start = int(past_seen_tokens)
    return bucket_bias(self, start) if hasattr(self, "relative_attention_bias") else PositionBias(None, start)


def compute_position_bias(self: Any, x: Tensor, position_ids: Tensor | None = None, num_buckets: int = 32) -> Any:
    """In place of `MPNetEncoder.compute_position_bias`."""
    if position_ids is not None or num_buckets != 32:
        return type(self).compute_position_bias(self, x, position_ids, num_buckets)
    return bucket_bias(self, 0)


def mpnet_forward(
    self: Any, hidden_states: Tensor, attention_mask: Any = None, position_bias: Any = None, **kwargs: Any
) -> tuple[Tensor]:
    """In place of `MPNetSelfAttention.forward`."""
    size = self.attention_head_size
    query, key, value = by_heads(hidden_states, size, self.q, self.k, self.v)
    kwargs |= {"scaling": size**-0.5, "dropout": self.dropout.p, "is_causal": False}
    out, _ = relpos_attention(self, query, key, value, attention_mask, position_bias=position_bias, **kwargs)
    return (self.o(out.flatten(2)),)


T5_LAYERS = (
    *("modeling_longt5.LongT5Attention", "modeling_mt5.MT5Attention", "modeling_pix2struct.Pix2StructTextAttention"),
    *("modeling_pop2piano.Pop2PianoAttention", "modeling_switch_transformers.SwitchTransformersAttention"),
    *("modeling_t5.T5Attention", "modeling_udop.UdopAttention", "modeling_umt5.UMT5Attention"),
)
ADAPTER = Adapter(
    {"longt5", "mpnet", "mt5", "pop2piano", "switch_transformers", "t5", "umt5"},
    describe,
    {
        **{layer: {"compute_bias": compute_bias, "has_relative_attention_bias": True} for layer in T5_LAYERS},
        "modeling_mpnet.MPNetEncoder": {"compute_position_bias": compute_position_bias},
        "modeling_mpnet.MPNetSelfAttention": {"forward": mpnet_forward},
    },
)
