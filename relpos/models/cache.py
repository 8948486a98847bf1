"""Gates in transformers' key-value caches, which have room for keys and values only.

The values that an input-dependent encoding needs for each token are appended to the token's value vector, bit for bit.
So any cache that stores values unchanged can be used, and what it does to values (reorder for beams, crop, repeat,
offload) it also does to the gates.
"""

import torch
from torch import Tensor
from transformers import Cache


def remember(
    cache: Cache, layer: int, keys: Tensor, values: Tensor, gates: Tensor | None, total: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Add the new tokens' keys, values and gates to the cache, and return those of all `total` tokens so far.

    Args:
        cache: A cache of transformers.
        layer: Number of the layer, 0 is the first.
        keys: (batch, key_heads, length, head_dim), unrotated.
        values: (batch, key_heads, length, head_dim).
        gates: (batch, heads, length, gate_size), or None.
        total: Number of tokens so far.

    Returns:
        Keys, values and gates of all tokens so far.
    """
    head_dim, key_heads = values.shape[-1], values.shape[1]
    if gates is None:
        keys, values = cache.update(keys, values, layer)
        return keys[:, :, :total], values[:, :, :total], None
    dtype, size = gates.dtype, gates.shape[-1]
    # Each key head carries the gates of the query heads that it serves: (batch, key_heads, length, group × gate_size).
    grouped = gates.view(len(gates), key_heads, -1, *gates.shape[2:]).transpose(2, 3).flatten(3)
    appended = grouped.contiguous().view(values.dtype)  # float32 beside bfloat16: twice as many numbers, the same bits
    keys, both = cache.update(keys, torch.cat([values, appended], dim=-1), layer)
    both = both[:, :, :total]  # a cache of fixed size is longer
    grouped = both[..., head_dim:].contiguous().view(dtype)
    gates = grouped.view(*grouped.shape[:3], -1, size).transpose(2, 3).flatten(1, 2)
    return keys[:, :, :total], both[..., :head_dim], gates


def tokens_seen(cache: Cache | None) -> int:
    """Number of tokens that the cache holds."""
    return 0 if cache is None else int(torch.as_tensor(cache.get_seq_length()))
