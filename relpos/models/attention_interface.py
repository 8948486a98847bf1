"""transformers' attention interface, served by `relpos.attention`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from relpos.attend import attention
from relpos.attend.arguments import WeightOptions
from relpos.forms.bias import Form, RankOne, Scored, Sum
from relpos.forms.call import Call
from relpos.forms.encoding import Encoding
from relpos.forms.tracing import has_values
from relpos.models.key_mask import WITHOUT, KeyMask, key_mask_of

NO_WEIGHTS = (
    "relpos never materialises the attention weights: set it to False, or call relpos.use(model, off=True) and "
    "model.set_attn_implementation('eager') to see them; relpos.mass has them by distance"
)
EARLIER = "_relpos_earlier"  # of the modules of a model that `relpos.use` has checked: the attributes that it replaced
LISTENER = "_relpos_listener"  # attribute of the modules of a model whose calls are captured
HARMLESS = (  # keywords of other implementations that change no number here, and also none in "eager" and "sdpa"
    "sliding_window",  # windows are part of our masks
    "position_ids",  # q and k arrive rotated, and packed sequences are part of our masks
    "deterministic",  # of flash attention's backward; ours is deterministic
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),  # flash attention's packing: as position_ids
    *("use_cache", "past_key_values", "cache_position"),  # the layer has updated its cache before it calls us
    *("output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"),  # of what the model returns
    *("labels", "num_items_in_batch"),  # of the loss
)
Bias = Callable[[Call], Form | None]
Listener = Callable[[nn.Module, Tensor, Tensor, "ModelBias | None", WeightOptions], None]


class ModelBias(Encoding):
    """The biases that a model's own code adds to the scores in one call of attention; functions that return forms."""

    paper = "the model's own"
    formula = "B = the sum of what the model's code adds to the scores"

    def __init__(self, heads: int, head_dim: int, biases: tuple[Bias, ...]) -> None:
        super().__init__(heads, head_dim)
        self.biases = biases

    def bias(self, call: Call) -> Form | None:
        forms = tuple(form for form in (bias(call) for bias in self.biases) if form is not None)
        if len(forms) < 2:
            return forms[0] if forms else None
        return Sum(forms)


def dense(bias: Tensor) -> Bias:
    """A bias that the model has materialised: broadcasts to (batch, heads, queries, keys)."""

    def make(call: Call) -> Form:
        values = bias.to(call.dtype)

        def block(i: Tensor, j: Tensor, scores: Any = None, visible: Any = None) -> Tensor:
            rows = values if values.shape[-2] == 1 else values.index_select(-2, i - call.first)
            columns = rows if rows.shape[-1] in (1, len(j)) else rows[..., : len(j)]
            return columns.expand(-1, call.heads, len(i), len(j))

        return Scored(block, {"bias": values})

    return make


def by_key(bias: Tensor) -> Bias:
    """A bias per key alone, (1 or batch, heads, keys), in causal attention.

    A constant per query changes no weight, so that bias_j may become bias_j − bias_i: the growth of a running sum.
    """

    def make(call: Call) -> Form:
        total = bias.to(torch.float64).expand(call.batch, call.heads, -1)
        return RankOne(total.contiguous(), None, call.dtype)

    return make


@dataclass(frozen=True)
class PositionBias:
    """A bias by position in place of the tensor (1, heads, queries, keys) that T5-type layers pass to each other."""

    bias: Bias | None  # None for no bias
    start: int  # index of the first query among the keys


def by_heads(x: Tensor, head_dim: int, *projections: nn.Module) -> list[Tensor]:
    """The projections of x (batch, tokens, width), each (batch, heads, tokens, head_dim)."""
    return [project(x).unflatten(-1, (-1, head_dim)).transpose(1, 2) for project in projections]


@contextmanager
def captured_calls(model: nn.Module, listener: Listener) -> Iterator[None]:
    """Within this context, call a function for each call of attention in a model after `relpos.use`.

    It gets the layer, its queries and keys, its bias and the further arguments of `attention`.
    """
    for module in model.modules():
        vars(module)[LISTENER] = listener
    try:
        yield
    finally:
        for module in model.modules():
            vars(module).pop(LISTENER, None)


def relpos_attention(
    module: nn.Module,
    query: Tensor,  # (batch, heads, queries, head_dim), rotated
    key: Tensor,  # (batch, key_heads, keys, head_dim), rotated
    value: Tensor,  # (batch, key_heads, keys, value_dim)
    attention_mask: Any,  # one of ours; or boolean or additive, (batch, heads, queries, keys); or None
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,  # of attention without a mask; None: as the layer says
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # sinks, (heads,)
    position_bias: Tensor | PositionBias | None = None,
    key_bias: Bias | None = None,  # from our own forwards
    indices: Tensor | None = None,  # see `selection`
    block_indices: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers' AttentionInterface: (batch, queries, heads, value_dim), and None for the weights."""
    check_keywords(module, keywords)
    batch, heads, queries, head_dim = query.shape
    biases: list[Bias] = [] if key_bias is None else [key_bias]
    key_mask = key_mask_of(attention_mask)
    if attention_mask is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and queries > 1
        if causal:  # as in sdpa, the first query is the first token: the rest of a static cache is empty
            key, value = key[:, :, :queries], value[:, :, :queries]
        key_mask = KeyMask(queries, key.shape[2], start=max(0, key.shape[2] - queries), causal=causal)
    elif key_mask is None:
        key_mask = read_mask(attention_mask, batch, queries, key.shape[2], biases)
    where = key_mask.arguments(batch, key.shape[2])
    selected = selection(module, indices, block_indices, heads, key.shape[2])
    if selected is not None:
        if where["mask"] is not None and not isinstance(where["mask"], Tensor):
            raise ValueError(f"relpos cannot select keys by index under a mask that is a function: {WITHOUT}.")
        where["mask"] = selected if where["mask"] is None else selected & where["mask"]
    if isinstance(position_bias, PositionBias):
        where["start"] = position_bias.start
        if position_bias.bias is not None:
            biases.append(position_bias.bias)
    elif position_bias is not None:
        biases.append(dense(position_bias))
    if where["start"] == key.shape[2] - queries and (where["causal"] or queries == key.shape[2]):
        del where["start"]  # the default
    position = ModelBias(heads, head_dim, tuple(biases)) if biases else None
    where |= {"scale": None if scaling is None else float(scaling), "softcap": softcap, "sinks": s_aux}
    listener = getattr(module, LISTENER, None)
    if listener is not None:
        listener(module, query, key, position, where)
    out = attention(query, key, value, position, dropout=dropout if module.training else 0.0, **where)
    return out.transpose(1, 2).contiguous(), None


def check_keywords(module: nn.Module, keywords: dict[str, Any]) -> None:
    """Refuse keywords that attention would have to ignore."""
    if keywords.pop("output_attentions", None):
        raise ValueError(f"output_attentions=True: {NO_WEIGHTS}.")
    if keywords.pop("cache", None) is not None:
        raise ValueError("relpos does not read the paged caches of continuous batching: use model.generate.")
    unknown = sorted(name for name, value in keywords.items() if value is not None and name not in HARMLESS)
    if unknown:
        raise ValueError(
            f"{type(module).__name__} gives attention {', '.join(unknown)}, which relpos does not know and will not "
            f"ignore: leave it out, or {WITHOUT}."
        )


def read_mask(mask: Any, batch: int, queries: int, keys: int, biases: list[Bias]) -> KeyMask:
    """A mask that is not ours; an additive one that does more than hide keys joins the biases."""
    if not isinstance(mask, Tensor) or mask.dim() != 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"the attention mask is {kind}; relpos takes boolean or additive masks (batch, heads, queries, keys). If "
            "the model is compiled in several graphs, compile it as one: torch.compile(model, fullgraph=True)."
        )
    seen = KeyMask(queries, keys, start=max(0, keys - queries), causal=False)
    mask = mask[..., :keys]
    if mask.is_floating_point():
        if not only_hides(mask):
            biases.append(dense(mask))
            return seen
        mask = mask == 0
    if mask.shape[1] == 1 and mask.shape[2] == 1:
        return replace(seen, padding=mask[:, 0, 0].expand(batch, keys))
    return replace(seen, mask=mask)


def only_hides(mask: Tensor) -> bool:
    """Whether an additive mask only hides keys, and leaves each query some; False in a graph, which has no values."""
    if mask.requires_grad or not has_values(mask):
        return False
    seen = mask == 0
    hidden = mask <= torch.finfo(mask.dtype).min / 2  # transformers adds the lowest value of a dtype
    return bool((seen | hidden).all() and seen.any(dim=-1).all())


def selection(
    module: Any, indices: Tensor | None, block_indices: Tensor | None, heads: int, keys: int
) -> Tensor | None:
    """A boolean mask (batch, 1 or heads, queries, keys) of the keys that a sparse layer has selected; None for all.

    `indices` are the only keys that each query may see, (batch, queries, top_k); `block_indices` the same by blocks of
    `indexer.block_size` keys, (batch, index_heads, queries, top_k), where −1 is no block. The mask is exact, but no
    faster than dense attention.
    """

    def among(places: Tensor, count: int) -> Tensor:
        return places.new_zeros((*places.shape[:-1], count), dtype=torch.bool).scatter(-1, places.long(), True)

    if indices is not None:
        return among(indices[:, None], keys)
    if block_indices is None:
        return None
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(size, int):
        raise ValueError(
            f"{type(module).__name__} selects keys by block_indices, and relpos finds no indexer.block_size in it: "
            f"{WITHOUT}."
        )
    blocks = -(-keys // size)
    seen = among(torch.where(block_indices < 0, blocks, block_indices), blocks + 1)[..., :blocks]
    return seen.repeat_interleave(size, -1)[..., :keys].repeat_interleave(heads // seen.shape[1], 1)
