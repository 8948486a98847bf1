"""Projected: a vector per query, or per key, times a vector per distance.

A square tile of B × B scores has 2B − 1 distances. Its tokens' vectors are multiplied by the 2B vectors of these
distances, in two products of B columns, and row p of the result is turned: score (p, o) takes column (p − o + B − 1)
modulo B of the first product or of the second. For keys, p is the key and o the query, and the sign of p − o changes.
"""

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from relpos.attend.triton.tiles import C_LOG2E, load_tile, product
from relpos.attend.triton.toeplitz_tile import PAD

QUERY_BIT, KEY_BIT = 8, 16


@triton.jit
def other_token(B: tl.constexpr, OF_KEYS: tl.constexpr):
    """For row p and column y of the products: the other token o, and whether the second product holds its score."""
    p, y = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    if OF_KEYS:
        o = (y + p + 1) & (B - 1)
        second = o >= p + 1
    else:
        o = (p + B - 1 - y) & (B - 1)
        second = p >= o + 1
    return o, second


@triton.jit
def projected_bias(u, RELATIVE, row, R: tl.constexpr, BR: tl.constexpr, B: tl.constexpr, OF_KEYS: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """The bias of a tile in log2, (p, o): `u` (B, BR) are its tokens' vectors, `row` the table's first distance."""
    near = product(u, tl.trans(load_tile(RELATIVE, row, R, row + B, B, R, BR)), None, PRECISION)
    far = product(u, tl.trans(load_tile(RELATIVE, row + B, R, row + 2 * B, B, R, BR)), None, PRECISION)
    _, second = other_token(B, OF_KEYS)
    p, o = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    column = ((o - p if OF_KEYS else p - o) + B - 1) & (B - 1)
    return tl.gather(tl.where(second, far, near), column, 1) * C_LOG2E


@triton.jit
def turned(ds, B: tl.constexpr, OF_KEYS: tl.constexpr):
    """The gradients of the two products from those of a tile's logits (p, o)."""
    o, second = other_token(B, OF_KEYS)
    columns = tl.gather(ds, o, 1)
    return tl.where(second, 0.0, columns), tl.where(second, columns, 0.0)


@triton.jit
def fold_vectors(acc, ds, RELATIVE, row, DTYPE: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, B: tl.constexpr,
                 OF_KEYS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add a tile's part of the gradient of its tokens' vectors, (B, BR)."""
    near, far = turned(ds, B, OF_KEYS)
    acc = product(near.to(DTYPE), load_tile(RELATIVE, row, R, row + B, B, R, BR), acc, PRECISION)
    return product(far.to(DTYPE), load_tile(RELATIVE, row + B, R, row + 2 * B, B, R, BR), acc, PRECISION)


def pack(inputs, arguments):
    """Vectors per token (batch, heads, tokens, R) and per distance (1 or heads, distances, R), in the dtype of q."""
    dtype = inputs.q.dtype
    for name in ("query", "key"):
        vectors, relative = getattr(inputs, f"{name}_vectors"), getattr(inputs, f"{name}_relative")
        if vectors is None:
            continue
        shape = (*inputs.q.shape[:2], -1, -1)
        padded = F.pad(relative.detach().to(dtype), (0, 0, PAD, PAD)).contiguous()
        arguments.update({
            f"{name.upper()}_VECTORS": vectors.detach().to(dtype).expand(shape).contiguous(),
            f"{name.upper()}_RELATIVE": padded,
            f"{name}_relative_h": padded.stride(0) if len(padded) > 1 else 0,
            "relative_zero": inputs.zero + PAD,
            "R": vectors.shape[-1],
            "BR": max(16, triton.next_power_of_2(vectors.shape[-1])),
        })  # fmt: skip


def gradients(inputs, name: str, vectors: Tensor, distances: Tensor) -> dict[str, Tensor]:
    """Gradients from those of all tokens (batch, heads, tokens, R) and the sums per distance (heads, distances, R)."""
    of_tokens, of_distances = getattr(inputs, f"{name}_vectors"), getattr(inputs, f"{name}_relative")
    if len(of_tokens) == 1:
        vectors = vectors.sum(0, keepdim=True)
    if len(of_distances) == 1:
        distances = distances.sum(0, keepdim=True)
    return {
        f"{name}_vectors": vectors.to(of_tokens.dtype),
        f"{name}_relative": distances.to(of_distances.dtype),
    }
