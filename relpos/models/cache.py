"""Gates in transformers' key-value caches, which have room for keys and values only.

The numbers that an input-dependent encoding needs of each token ride at the end of its value, bit for bit: so every
cache that stores what it is given can be used, and whatever it does to values (reorder for beams, crop, repeat,
offload) it does to the gates.
"""

import torch
from torch import Tensor
from transformers import Cache


def remember(
    cache: Cache, layer: int, keys: Tensor, values: Tensor, gates: Tensor | None, total: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Add the new tokens' keys, values and gates to the cache, and give those of all `total` tokens so far.

    keys and values (batch, heads, length, head_dim), keys unrotated; gates (batch, heads, length, numbers) or None.
    """
    head_dim = values.shape[-1]
    if gates is None:
        keys, values = cache.update(keys, values, layer)
        return keys[:, :, :total], values[:, :, :total], None
    dtype = gates.dtype
    riding = gates.contiguous().view(values.dtype)  # float32 beside bfloat16: twice as many numbers, the same bits
    keys, both = cache.update(keys, torch.cat([values, riding], dim=-1), layer)
    both = both[:, :, :total]  # a cache of fixed size is longer
    return keys[:, :, :total], both[..., :head_dim], both[..., head_dim:].contiguous().view(dtype)


def seen(cache: Cache | None) -> int:
    """How many tokens the cache holds."""
    return 0 if cache is None else int(torch.as_tensor(cache.get_seq_length()))
