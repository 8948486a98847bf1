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
from relpos.pretrained.attention_interface import Bias, PositionBias, relpos_attention
from relpos.pretrained.layer_position import Adapter, LayerPosition, Methods, ModelLayer, words_of_table

TERMS = {"c2p": "content to position", "p2c": "position to content"}


def describe(layer: ModelLayer) -> LayerPosition:
    """The terms of one layer. They depend on the content, so that there is no bias by distance alone."""
    module = layer.module
    terms = [TERMS[term] for term in module.pos_att_type if term in TERMS] if module.relative_attention else []
    added = layer.table() if layer.config.position_biased_input else None
    table = None if added is None else added[0]
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
    """In place of the encoder's method: distances are counted in attention.

    Raises:
        ValueError: There are distances of the caller's own.
    """
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
    keys = queries = None
    span = 0
    if self.relative_attention and rel_embeddings is not None:
        middle = self.max_relative_positions
        span = min(max(query.shape[2], key.shape[2]), middle)
        embeddings = self.pos_dropout(rel_embeddings)[None, middle - span : middle + span]
        keys = split(self, self.pos_proj(embeddings))[0] if "c2p" in self.pos_att_type else None
        queries = split(self, self.pos_q_proj(embeddings))[0] if "p2c" in self.pos_att_type else None
    terms = len(self.pos_att_type)
    return attend(self, query, key, value, attention_mask, output_attentions, terms, span, keys, queries)


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
    to_position, from_position = (term in self.pos_att_type for term in ("c2p", "p2c"))
    keys = queries = None
    span = 0
    if self.relative_attention:
        span = self.pos_ebd_size
        embeddings = self.pos_dropout(rel_embeddings)[None, : 2 * span]
        if to_position:
            keys = split(self, (self.key_proj if self.share_att_key else self.pos_key_proj)(embeddings))[0]
        if from_position:
            queries = split(self, (self.query_proj if self.share_att_key else self.pos_query_proj)(embeddings))[0]
    terms = to_position + from_position
    return attend(self, query, key, value, attention_mask, output_attentions, terms, span, keys, queries)


def split(self: Any, x: Tensor) -> Tensor:
    """(batch, tokens, heads × size) by heads: (batch, heads, tokens, size)."""
    return x.view(*x.shape[:2], self.num_attention_heads, -1).transpose(1, 2)


def attend(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    output_attentions: bool,
    terms: int,
    span: int,
    position_keys: Tensor | None,
    position_queries: Tensor | None,
) -> tuple[Tensor, None]:
    """Attention with the two terms of position.

    Args:
        self: The layer.
        query: (batch, heads, tokens, head_dim), likewise key and value.
        key: Not scaled either.
        value: As it is.
        attention_mask: From `get_attention_mask`.
        output_attentions: Refused if True.
        terms: How many terms the scale counts.
        span: Half of the rows of the tables.
        position_keys: K of the first term, (heads, 2 · span, head_dim), or None.
        position_queries: Q of the second, likewise.
    """
    scale = (query.shape[-1] * (1 + terms)) ** -0.5
    bias: Bias | None = None
    if position_keys is not None or position_queries is not None:

        def bias(call: Call) -> Form:
            row = (bucketed(self, call.distances.long()) + span).clamp(0, 2 * span - 1)  # (distances,)
            forms = tuple(
                Projected(vectors.to(call.dtype), table.to(call.dtype) * scale, call.zero, row, of_keys, call.first)
                for vectors, table, of_keys in ((query, position_keys, False), (key, position_queries, True))
                if table is not None
            )
            return forms[0] if len(forms) == 1 else Sum(forms)

    out, _ = relpos_attention(
        self,
        query,
        key,
        value,
        attention_mask,
        scaling=scale,
        dropout=self.dropout.p,
        is_causal=False,
        position_bias=None if bias is None else PositionBias(bias, 0),
        output_attentions=output_attentions,
    )
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


ENCODER: Methods = {"get_attention_mask": get_attention_mask, "get_rel_pos": get_rel_pos}
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
