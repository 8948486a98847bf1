"""Conformers: a vector per query against a table of vectors over distances, in place of the bias that they materialise.

Transformer-XL's positions ("relative"): scores_ij = ((q_i + u)·k_j + (q_i + v)·R[i − j]) / √head_dim, R projected from
sines and cosines. Shaw's ("relative_key"): scores_ij = (q_i·k_j + q_i·R[clip(j − i)]) / √head_dim, R learned.
"""

from typing import Any

from torch import Tensor

from relpos.forms.bias import Projected
from relpos.forms.call import Call
from relpos.models.attention_interface import PositionBias, by_heads, relpos_attention
from relpos.pretrained.layer_position import Adapter


def forward(self: Any, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> tuple[Tensor, None]:
    """In place of the forward of wav2vec2-conformer's, wav2vec2-bert's and SeamlessM4T's conformer attention."""
    if self.position_embeddings_type not in ("relative", "relative_key"):
        return type(self).forward(self, hidden_states, attention_mask, **kwargs)[0], None
    query, key, value = by_heads(hidden_states, self.head_size, self.linear_q, self.linear_k, self.linear_v)
    embeddings = kwargs.pop("relative_position_embeddings", None)
    if self.position_embeddings_type == "relative":
        if embeddings is None:
            raise ValueError('a layer with "relative" positions needs relative_position_embeddings.')
        bias = over_distances(query + self.pos_bias_v[:, None], self.linear_pos(embeddings), self.scaling)
        query = query + self.pos_bias_u[:, None]
    else:
        bias = clipped(self, query)
    kwargs |= {"scaling": self.scaling, "dropout": self.dropout.p, "position_bias": bias}
    out, _ = relpos_attention(self, query, key, value, attention_mask, **kwargs)
    return self.linear_out(out.flatten(2)), None


def parakeet_forward(
    self: Any, hidden_states: Tensor, position_embeddings: Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """In place of `ParakeetEncoderAttention.forward`."""
    if self.training and self.config.dropout_positions:  # each row of the batch has a table of its own
        return type(self).forward(self, hidden_states, position_embeddings, attention_mask, **kwargs)[0], None
    query, key, value = by_heads(hidden_states, self.head_dim, self.q_proj, self.k_proj, self.v_proj)
    projected = self.relative_k_proj(position_embeddings[:1])  # one row serves the batch
    bias = over_distances(query + self.bias_v[:, None], projected, self.scaling)
    kwargs |= {"scaling": self.scaling, "dropout": self.attention_dropout, "position_bias": bias}
    out, _ = relpos_attention(self, query + self.bias_u[:, None], key, value, attention_mask, **kwargs)
    return self.o_proj(out.flatten(2)), None


def over_distances(vectors: Tensor, projected: Tensor, scale: float) -> PositionBias:
    """The bias of vectors, one per query: (batch, heads, tokens, size), with a table over distances.

    The table is (1, 2 · tokens − 1, heads × size), from distance tokens − 1 down to −(tokens − 1).
    """

    def bias(call: Call) -> Projected:
        rows = projected.view(projected.shape[1], vectors.shape[1], -1)  # (distances, heads, size)
        table = rows.transpose(0, 1).flip(1)
        return Projected(vectors.to(call.dtype), table.to(call.dtype) * scale, call.zero, first=call.first)

    return PositionBias(bias, 0)


def clipped(self: Any, query: Tensor) -> PositionBias:
    """The bias of queries with one learned vector per clipped distance, which all heads share."""

    def bias(call: Call) -> Projected:
        before, after = self.left_max_position_embeddings, self.right_max_position_embeddings
        row = (-call.distances.long()).clamp(-before, after) + before  # (distances,)
        table = self.distance_embedding.weight[None].to(call.dtype) * self.scaling
        return Projected(query.to(call.dtype), table, call.zero, row, first=call.first)

    return PositionBias(bias, 0)


LAYERS = (
    "modeling_seamless_m4t.SeamlessM4TConformerSelfAttention",
    "modeling_seamless_m4t_v2.SeamlessM4Tv2ConformerSelfAttention",
    "modeling_wav2vec2_bert.Wav2Vec2BertSelfAttention",
    "modeling_wav2vec2_conformer.Wav2Vec2ConformerSelfAttention",
)
ADAPTER = Adapter(
    attributes={
        **{layer: {"forward": forward} for layer in LAYERS},
        "modeling_parakeet.ParakeetEncoderAttention": {"forward": parakeet_forward},
    }
)
