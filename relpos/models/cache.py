"""Transformers' key-value caches: gates in them, and growth without copying all tokens at every step.

The values that an input-dependent encoding needs for each token are appended to the token's value vector, bit for bit.
So any cache that stores values unchanged can be used, and what it does to values (reorder for beams, crop, repeat,
offload) it also does to the gates.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from relpos.attend.cache import GrowingTensor


class GrowingLayer(DynamicLayer):
    """A layer of transformers' `DynamicCache` that adds tokens in place where nothing is differentiated.

    Concatenation, which transformers uses, copies the keys and values of all tokens at every step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._memory = GrowingTensor(), GrowingTensor()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add the new tokens' keys and values, (batch, heads, tokens, size), and return those of all tokens."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():  # what a backward pass may read stays unwritten
            both: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return both
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before: tuple[Tensor, Tensor] = (key_states[:, :, :0], value_states[:, :, :0])
        if self.get_seq_length():
            before = self.keys, self.values
        self.keys: Tensor = self._memory[0].extend(before[0], key_states)
        self.values: Tensor = self._memory[1].extend(before[1], value_states)
        return self.keys, self.values


def make_growing(cache: Cache | None) -> None:
    """Let the layers of a `DynamicCache` add tokens in place; another kind of cache stays what it is."""
    if cache is None or type(cache) is not DynamicCache or cache.offloading:
        return
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer
    for place, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            growing = cache.layers[place] = GrowingLayer()
            growing.__dict__.update(vars(layer))


def remember(
    cache: Cache, layer: int, keys: Tensor, values: Tensor, gates: Tensor | None, total: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Add the new tokens' keys, values and gates to the cache, and return those of all `total` tokens so far.

    Args:
        cache: A cache of transformers.
        layer: Number of the layer, 0 is the first.
        keys: (batch, key_heads, length, head_dim).
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
