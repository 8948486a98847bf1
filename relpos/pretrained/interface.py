"""transformers' attention interface, served by `relpos.attention`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from relpos.attend import attention
from relpos.forms.tracing import has_values
from relpos.pretrained.biases import Bias, ModelsOwn, dense
from relpos.pretrained.visible import visible_of

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
Listener = Callable[[nn.Module, Tensor, Tensor, "ModelsOwn | None", dict[str, Any]], None]
LISTENERS: list[Listener] = []  # called with each module, its queries and keys, bias and further arguments


class PositionBias:
    """A bias by position in place of the tensor (1, heads, queries, keys) that T5-type layers pass to each other.

    Args:
        bias: The form of the bias, or None for no bias.
        start: Index of the first query among the keys.
    """

    def __init__(self, bias: Bias | None, start: int) -> None:
        self.bias, self.start = bias, start


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
        attention_mask: From `relpos.pretrained.masks`; or boolean or additive, broadcastable to (batch, heads,
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
    visible = visible_of(attention_mask)
    if visible is not None:
        where = visible.arguments(batch, key.shape[2])
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
    position = ModelsOwn(heads, head_dim, tuple(biases)) if biases else None
    arguments = {"scale": None if scaling is None else float(scaling), "softcap": softcap, "sinks": s_aux, **where}
    for listener in LISTENERS:
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
        ValueError: It is no mask with four axes.
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
