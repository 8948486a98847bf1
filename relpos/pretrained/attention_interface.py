"""transformers' attention interface, served by `relpos.attention`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from relpos.attend import attention
from relpos.forms.bias import Form, RankOne, Scored, Sum
from relpos.forms.call import Call
from relpos.forms.encoding import Encoding
from relpos.forms.tracing import has_values
from relpos.pretrained.key_mask import key_mask_of

NO_WEIGHTS = (
    "relpos never materialises the attention weights: set it to False, or call relpos.use(model, off=True) and "
    "model.set_attn_implementation('eager') to see them; relpos.mass has them by distance"
)
CHECKED = "_relpos_checked"  # attribute of the modules of a model that `relpos.use` has switched to ours
HARMLESS = (  # keywords of other implementations that change no number here, and also none in "eager" and "sdpa"
    "sliding_window",  # windows are part of our masks
    "position_ids",  # q and k arrive rotated, and packed sequences are part of our masks
    "deterministic",  # of flash attention's backward; ours is deterministic
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),  # flash attention's packing: as position_ids
    *("use_cache", "past_key_values", "cache_position"),  # the layer has updated its cache before it calls us
    *("output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"),  # of what the model returns
    *("labels", "num_items_in_batch"),  # of the loss
)
LISTENER = "_relpos_listener"  # attribute of the modules of a model whose calls are captured
Bias = Callable[[Call], Form | None]
Listener = Callable[[nn.Module, Tensor, Tensor, "ModelBias | None", dict[str, Any]], None]


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
            columns = rows if rows.shape[-1] == 1 or rows.shape[-1] == len(j) else rows[..., : len(j)]
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


@contextmanager
def captured_calls(model: nn.Module, listener: Listener) -> Iterator[None]:
    """Within this context, tell a function of each call of attention in a model that runs on ours.

    Args:
        model: A model after `relpos.use`.
        listener: Called with the layer, its queries and keys, its bias and the further arguments of `attention`.
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | PositionBias | None = None,
    cache: Any = None,
    output_attentions: bool | None = None,
    key_bias: Bias | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers' AttentionInterface.

    Args:
        module: The attention layer.
        query: (batch, heads, queries, head_dim), rotated.
        key: (batch, key_heads, keys, head_dim), rotated.
        value: (batch, key_heads, keys, value_dim).
        attention_mask: From `relpos.pretrained.mask_functions`; or boolean or additive, broadcastable to (batch, heads,
            queries, keys); or None.
        scaling: Factor of q·k.
        dropout: Share of the weights that is dropped while training.
        is_causal: Whether attention without a mask is causal; if None, as the layer says.
        softcap: Bound of the scores.
        s_aux: Sinks, (heads,).
        position_bias: Added to the scores.
        cache: Of continuous batching, which is refused.
        output_attentions: Refused if True.
        key_bias: A bias per key, from the adapters of this package.
        indices: The only keys that each query may see, (batch, queries, top_k). They become a boolean mask of queries ×
            keys: exact, but no faster than dense attention.
        block_indices: The same by blocks of keys, (batch, index_heads, queries, top_k); −1 is no block. The layer's
            `indexer.block_size` is their size.
        **kwargs: Those of `HARMLESS`, and any that are None.

    Returns:
        (batch, queries, heads, value_dim), and None for the weights, which are never materialised.

    Raises:
        ValueError: The model was not checked; the weights, a paged cache or an unknown keyword were given; or the mask
            is of an unknown kind.
    """
    check_call(module, cache, output_attentions, kwargs)
    batch, heads, queries, head_dim = query.shape
    biases: list[Bias] = [] if key_bias is None else [key_bias]
    key_mask = key_mask_of(attention_mask)
    if key_mask is not None:
        where = key_mask.arguments(batch, key.shape[2])
    elif attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        where = {"causal": bool(causal) and queries > 1, "start": max(0, key.shape[2] - queries)}
        if where["causal"]:  # as in sdpa, the first query is the first token: the rest of a static cache is empty
            key, value = key[:, :, :queries], value[:, :, :queries]
            where["start"] = 0
    else:
        where = read_mask(attention_mask, batch, queries, key.shape[2], biases)
    select_keys(where, selection(module, indices, block_indices, heads, key.shape[2]))
    if isinstance(position_bias, PositionBias):
        where["start"] = position_bias.start
        if position_bias.bias is not None:
            biases.append(position_bias.bias)
    elif position_bias is not None:
        biases.append(dense(position_bias))
    if where["start"] == key.shape[2] - queries and (where["causal"] or queries == key.shape[2]):
        del where["start"]  # the default
    position = ModelBias(heads, head_dim, tuple(biases)) if biases else None
    arguments = {"scale": None if scaling is None else float(scaling), "softcap": softcap, "sinks": s_aux, **where}
    listener = getattr(module, LISTENER, None)
    if listener is not None:
        listener(module, query, key, position, arguments)
    out = attention(query, key, value, position, dropout=dropout if module.training else 0.0, **arguments)
    return out.transpose(1, 2).contiguous(), None


def check_call(module: nn.Module, cache: Any, output_attentions: bool | None, keywords: dict[str, Any]) -> None:
    """Refuse what `relpos_attention` would have to ignore.

    Raises:
        ValueError: The model was not checked; or the weights, a paged cache or an unknown keyword were given.
    """
    if not getattr(module, CHECKED, False):
        raise ValueError(
            f"{type(module).__name__} runs on relpos by the name in its configuration, and relpos has not checked its "
            "model: call relpos.use(model)."
        )
    if output_attentions:
        raise ValueError(f"output_attentions=True: {NO_WEIGHTS}.")
    if cache is not None:
        raise ValueError("relpos does not read the paged caches of continuous batching: use model.generate.")
    unknown = sorted(name for name, value in keywords.items() if value is not None and name not in HARMLESS)
    if unknown:
        raise ValueError(
            f"{type(module).__name__} gives attention {', '.join(unknown)}, which relpos does not know and will not "
            "ignore: leave it out, or run the model without relpos (relpos.use(model, off=True))."
        )


def read_mask(mask: Any, batch: int, queries: int, keys: int, biases: list[Bias]) -> dict[str, Any]:
    """A mask that is not ours, as arguments of attention; an additive one joins the biases.

    Raises:
        ValueError: It is not a mask with four axes.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"the attention mask is {kind}; relpos takes boolean or additive masks (batch, heads, queries, keys). If "
            "the model is compiled in several graphs, compile it as one: torch.compile(model, fullgraph=True)."
        )
    where: dict[str, Any] = {"causal": False, "start": max(0, keys - queries)}
    mask = mask[..., :keys]
    if mask.is_floating_point() and only_hides(mask):
        mask = mask == 0
    if mask.is_floating_point():
        biases.append(dense(mask))
    elif mask.shape[1] == 1 and mask.shape[2] == 1:
        where["padding"] = mask[:, 0, 0].expand(batch, keys)
    else:
        where["mask"] = mask
    return where


def selection(
    module: nn.Module, indices: Tensor | None, block_indices: Tensor | None, heads: int, keys: int
) -> Tensor | None:
    """A boolean mask (batch, 1 or heads, queries, keys) of the keys that a sparse layer has selected; None for all.

    Raises:
        ValueError: The layer does not say how long a block is.
    """
    if indices is not None:
        return selected(indices[:, None], keys)
    if block_indices is None:
        return None
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(size, int):
        raise ValueError(
            f"{type(module).__name__} selects keys by block_indices, and relpos finds no indexer.block_size in it: run "
            "the model without relpos (relpos.use(model, off=True))."
        )
    blocks = -(-keys // size)
    places = torch.where(block_indices < 0, blocks, block_indices)
    seen = selected(places, blocks + 1)[..., :blocks]
    return seen.repeat_interleave(size, -1)[..., :keys].repeat_interleave(heads // seen.shape[1], 1)


def selected(indices: Tensor, places: int) -> Tensor:
    """Which of some places are among the indices (…, top_k): boolean (…, places)."""
    seen = indices.new_zeros((*indices.shape[:-1], places), dtype=torch.bool)
    return seen.scatter(-1, indices.long(), True)


def select_keys(where: dict[str, Any], seen: Tensor | None) -> None:
    """Let a call of attention see selected keys only.

    Args:
        where: Arguments of the call, which change.
        seen: (batch, 1 or heads, queries, keys), or None for all.

    Raises:
        ValueError: The call has a mask that is a function, which no boolean tensor can join.
    """
    mask = where.get("mask")
    if seen is None:
        return
    if mask is not None and not isinstance(mask, Tensor):
        raise ValueError(
            "relpos cannot select keys by index under a mask that is a function: run the model without relpos "
            "(relpos.use(model, off=True))."
        )
    where["mask"] = seen if mask is None else seen & mask


def only_hides(mask: Tensor) -> bool:
    """Whether an additive mask only hides keys, and leaves each query some.

    The lowest value of a dtype is what transformers adds to hide a key. Values of a graph are not read.
    """
    if mask.requires_grad or not has_values(mask):
        return False
    seen = mask == 0
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return bool((seen | hidden).all() and seen.any(dim=-1).all())
