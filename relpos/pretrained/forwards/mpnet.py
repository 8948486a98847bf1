"""MPNet: T5's buckets in one table that all layers share."""

from typing import Any

import torch
from torch import Tensor

from relpos.forms.bias import Toeplitz
from relpos.forms.call import Call
from relpos.pretrained.interface import PositionBias, relpos_attention


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
