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
from relpos.models.attention_interface import PositionBias, relpos_attention
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


def forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor,
    output_attentions: bool = False,
    query_states: Tensor | None = None,
    relative_pos: Any = None,
    rel_embeddings: Tensor | None = None,
) -> tuple[Tensor, None]:
    """In place of `DisentangledSelfAttention.forward` of both versions."""

    def split(x: Tensor) -> Tensor:  # (batch, tokens, heads × size) to (batch, heads, tokens, size)
        return x.view(*x.shape[:2], self.num_attention_heads, -1).transpose(1, 2)

    if hasattr(self, "in_proj"):  # version 1
        query, key, value = split(self.in_proj(hidden_states)).chunk(3, dim=-1)
        if query_states is not None:
            query = split(self.in_proj(query_states)).chunk(3, dim=-1)[0]
        query, value = (x + split(b[None, None]) for x, b in ((query, self.q_bias), (value, self.v_bias)))
        to_keys, to_queries, terms = "pos_proj", "pos_q_proj", len(self.pos_att_type)
        middle = self.max_relative_positions
        span = min(max(query.shape[2], key.shape[2]), middle)
    else:
        query = split(self.query_proj(hidden_states if query_states is None else query_states))
        key, value = split(self.key_proj(hidden_states)), split(self.value_proj(hidden_states))
        to_keys, to_queries = ("key_proj", "query_proj") if self.share_att_key else ("pos_key_proj", "pos_query_proj")
        terms = sum(term in self.pos_att_type for term in TERMS)
        middle = span = getattr(self, "pos_ebd_size", 0)
    scale = (query.shape[-1] * (1 + terms)) ** -0.5
    tables = []  # vectors, the table that they meet (heads, rows, head_dim), and whether they are keys
    if self.relative_attention and rel_embeddings is not None:
        embeddings = self.pos_dropout(rel_embeddings)[None, middle - span : middle + span]
        if "c2p" in self.pos_att_type:
            tables.append((query, split(getattr(self, to_keys)(embeddings))[0], False))
        if "p2c" in self.pos_att_type:
            tables.append((key, split(getattr(self, to_queries)(embeddings))[0], True))

    def bias(call: Call) -> Form:
        forms = []
        for vectors, table, of_keys in tables:
            row = bucketed(self, call.distances.long()) + table.shape[1] // 2  # (distances,)
            row, scaled = row.clamp(0, table.shape[1] - 1), table.to(call.dtype) * scale
            forms.append(Projected(vectors.to(call.dtype), scaled, call.zero, row, of_keys, call.first))
        return forms[0] if len(forms) == 1 else Sum(tuple(forms))

    options = {"scaling": scale, "dropout": self.dropout.p, "is_causal": False, "output_attentions": output_attentions}
    position = PositionBias(bias, 0) if tables else None
    out, _ = relpos_attention(self, query, key, value, attention_mask, position_bias=position, **options)
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
        "modeling_deberta.DisentangledSelfAttention": {"forward": forward},
        "modeling_deberta_v2.DebertaV2Encoder": ENCODER,
        "modeling_deberta_v2.DisentangledSelfAttention": {"forward": forward},
    },
)
