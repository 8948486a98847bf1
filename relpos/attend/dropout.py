"""Which attention weights are dropped: a hash of the seed and of the indices, the same in every backend.

Nothing is stored: the backward computes it again. It does not depend on threads, blocks, or how a sequence is divided.
The native kernel has the same function (native/src/dropout.h).
"""

import torch
from torch import Tensor

LOW = 0xFFFFFFFF  # arithmetic is modulo 2^32, in int64
BITS = 24  # of a hash that decide


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers whose every output bit depends on every input bit."""
    x = x & LOW
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & LOW
    x = ((x ^ (x >> 15)) * 0x735A2D97) & LOW
    return x ^ (x >> 15)


def kept(seed: Tensor, share: float, b: Tensor, h: Tensor, i: Tensor, j: Tensor, heads: int) -> Tensor:
    """Whether each weight is kept.

    Args:
        seed: A 0-d int64 tensor, from 0 to 2^63 − 1.
        share: Share of the weights that is dropped, from 0 to below 1.
        b: Indices in the batch; b, h, i and j broadcast together.
        h: Indices of heads.
        i: Indices of queries on the axis of the keys.
        j: Indices of keys.
        heads: Number of heads.

    Returns:
        Booleans in the common shape.
    """
    head = mix(mix(mix(seed) + (seed >> 32)) + (b * heads + h))
    row = mix(head + i)
    hashed = mix(row + mix(j + 0x9E3779B9))
    return (hashed >> (32 - BITS)).ge(round(share * 2**BITS))


def factors(seed: Tensor, share: float, batch: int, heads: int, i: Tensor, j: Tensor, dtype: torch.dtype) -> Tensor:
    """What the weights are multiplied by, 0 or 1 / (1 − share): (batch, heads, rows, keys).

    Args:
        seed: A 0-d int64 tensor.
        share: Share of the weights that is dropped.
        batch: Size of the batch.
        heads: Number of heads.
        i: Indices of the queries, (rows,).
        j: Indices of the keys, (keys,).
        dtype: Of the result.
    """
    b = torch.arange(batch, device=i.device)[:, None, None, None]
    h = torch.arange(heads, device=i.device)[:, None, None]
    seed = seed.to(i.device, non_blocking=True)  # no wait for an accelerator
    return kept(seed, share, b, h, i[:, None], j, heads).to(dtype) / (1 - share)
