"""DeBERTa, versions 1 and 2 (which version 3 shares): scores of content with content, and of content with position.

scores_ij = (q_i·k_j + q_i·K[δ(i − j)] + k_j·Q[δ(i − j)]) / √(head_dim · (1 + terms)), with K and Q projected from one
table of embeddings that all layers share, and δ the distance, clipped or in logarithmic buckets. A layer may have one
of the two terms only. Nothing of queries × keys is materialised: neither the mask, nor the distances, nor the products.
"""

from typing import Any

import torch
from torch import Tensor

from relpos.forms.bias import Form, Projected, Sum
from relpos.forms.call import Call
from relpos.pretrained.attention_interface import PositionBias, relpos_attention
from relpos.pretrained.layer_position import Adapter, LayerPosition, ModelLayer, words_of_table

TERMS = {"c2p": "content to position", "p2c": "position to content"}


def describe(layer: ModelLayer) -> LayerPosition:
    """The terms of one layer. They depend on the content, so that there is no bias by distance alone."""
    module = layer.module
    terms = [TERMS[term] for term in module.pos_att_type if term in TERMS] if module.relative_attention else []
    table = layer.table[0] if layer.config.position_biased_input and layer.table is not None else None
    parts = []
    if terms:
        span, buckets = module.max_relative_positions, getattr(module, "position_buckets", -1)
        spacing = f"{2 * buckets} log-spaced buckets" if buckets > 0 else "one embedding per distance"
        shared = "projected as the content is" if getattr(module, "share_att_key", False) else "own projections"
        parts.append(f"DeBERTa, {' and '.join(terms)}: {spacing} up to distance {span:,}, {shared}")
    if table is not None:
        parts.append(words_of_table(table))
    kind = "deberta" if terms else "none" if table is None else "learned"
    return layer.position(kind, "; and ".join(parts) or "no position", table=table)


def get_attention_mask(self: Any, attention_mask: Tensor) -> Tensor:
    """In place of the encoder's method: keys that count, (batch, 1, 1, keys).

    The model's own is (batch, 1, queries, keys), and hides all keys from padding too. Nothing reads the results there.
    """
    if attention_mask.dim() == 2:
        return attention_mask.bool()[:, None, None]
    mask: Tensor = type(self).get_attention_mask(self, attention_mask)
    return mask.bool()


def get_rel_pos(self: Any, hidden_states: Tensor, query_states: Any = None, relative_pos: Any = None) -> None:
    """In place of the encoder's method: distances are counted in attention."""
    if relative_pos is not None:
        raise ValueError("relpos counts the distances itself: leave relative_pos out, or relpos.use(model, off=True).")


def forward_v1(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor,
    output_attentions: bool = False,
    query_states: Tensor | None = None,
    relative_pos: Any = None,
    rel_embeddings: Tensor | None = None,
) -> tuple[Tensor, None]:
    """In place of `DisentangledSelfAttention.forward` of version 1."""
    query, key, value = split(self, self.in_proj(hidden_states)).chunk(3, dim=-1)
    if query_states is not None:
        query = split(self, self.in_proj(query_states)).chunk(3, dim=-1)[0]
    query = query + split(self, self.q_bias[None, None])
    value = value + split(self, self.v_bias[None, None])
    tables: tuple[Tensor | None, Tensor | None] = (None, None)
    if self.relative_attention and rel_embeddings is not None:
        middle = self.max_relative_positions
        span = min(max(query.shape[2], key.shape[2]), middle)
        embeddings = self.pos_dropout(rel_embeddings)[None, middle - span : middle + span]
        tables = (
            split(self, self.pos_proj(embeddings))[0] if "c2p" in self.pos_att_type else None,
            split(self, self.pos_q_proj(embeddings))[0] if "p2c" in self.pos_att_type else None,
        )
    return attend(self, (query, key, value), tables, len(self.pos_att_type), attention_mask, output_attentions)


def forward_v2(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor,
    output_attentions: bool = False,
    query_states: Tensor | None = None,
    relative_pos: Any = None,
    rel_embeddings: Tensor | None = None,
) -> tuple[Tensor, None]:
    """In place of `DisentangledSelfAttention.forward` of version 2."""
    query = split(self, self.query_proj(hidden_states if query_states is None else query_states))
    key, value = split(self, self.key_proj(hidden_states)), split(self, self.value_proj(hidden_states))
    terms = [term for term in TERMS if term in self.pos_att_type]
    tables: tuple[Tensor | None, Tensor | None] = (None, None)
    if self.relative_attention:
        embeddings = self.pos_dropout(rel_embeddings)[None, : 2 * self.pos_ebd_size]
        prefix = "" if self.share_att_key else "pos_"
        tables = (
            split(self, getattr(self, f"{prefix}key_proj")(embeddings))[0] if "c2p" in terms else None,
            split(self, getattr(self, f"{prefix}query_proj")(embeddings))[0] if "p2c" in terms else None,
        )
    return attend(self, (query, key, value), tables, len(terms), attention_mask, output_attentions)


def split(self: Any, x: Tensor) -> Tensor:
    """(batch, tokens, heads × size) by heads: (batch, heads, tokens, size)."""
    return x.view(*x.shape[:2], self.num_attention_heads, -1).transpose(1, 2)


def attend(
    self: Any,
    projected: tuple[Tensor, Tensor, Tensor],
    tables: tuple[Tensor | None, Tensor | None],
    terms: int,
    attention_mask: Tensor,
    output_attentions: bool,
) -> tuple[Tensor, None]:
    """Attention of projected queries, keys and values, (batch, heads, tokens, head_dim), with the terms of position.

    The tables are K and Q above, (heads, rows, head_dim) each; None for a term that the layer does not have. The scale
    counts `terms` of them.
    """
    query, key, _ = projected
    scale = (query.shape[-1] * (1 + terms)) ** -0.5

    def bias(call: Call) -> Form:
        forms = []
        for vectors, table, of_keys in ((query, tables[0], False), (key, tables[1], True)):
            if table is not None:
                rows = table.shape[1]
                row = (bucketed(self, call.distances.long()) + rows // 2).clamp(0, rows - 1)  # (distances,)
                scaled = table.to(call.dtype) * scale
                forms.append(Projected(vectors.to(call.dtype), scaled, call.zero, row, of_keys, call.first))
        return forms[0] if len(forms) == 1 else Sum(tuple(forms))

    position = None if tables == (None, None) else PositionBias(bias, 0)
    options = {"scaling": scale, "dropout": self.dropout.p, "is_causal": False, "output_attentions": output_attentions}
    out, _ = relpos_attention(self, *projected, attention_mask, position_bias=position, **options)
    return out.flatten(2), None


def bucketed(self: Any, distance: Tensor) -> Tensor:
    """Distances in the model's logarithmic buckets, if it has them; in float32, as there."""
    buckets, longest = getattr(self, "position_buckets", -1), self.max_relative_positions
    if buckets <= 0 or longest <= 0:
        return distance
    middle = buckets // 2
    far = torch.where(distance.abs() < middle, middle - 1, distance.abs())
    spread = torch.log(torch.tensor((longest - 1) / middle, dtype=torch.float32, device=distance.device))
    bucket = torch.ceil(torch.log(far.float() / middle) / spread * (middle - 1)) + middle
    return torch.where(far <= middle, distance, (bucket * distance.sign()).long())


ENCODER = {"get_attention_mask": get_attention_mask, "get_rel_pos": get_rel_pos}
ADAPTER = Adapter(
    {"deberta", "deberta-v2"},
    describe,
    {  # both versions have a DisentangledSelfAttention
        "modeling_deberta.DebertaEncoder": ENCODER,
        "modeling_deberta.DisentangledSelfAttention": {"forward": forward_v1},
        "modeling_deberta_v2.DebertaV2Encoder": ENCODER,
        "modeling_deberta_v2.DisentangledSelfAttention": {"forward": forward_v2},
    },
)
