"""The bias of a tile, of every form that the constant FORM has a bit of, added to its scores.

Index and row values broadcast to the tile, so that one function serves tiles (queries, keys) and (keys, queries).
"""

import triton
import triton.language as tl

from relpos.attend.triton import projected_tile, rank_one_tile, scaled_tile, toeplitz_tile
from relpos.attend.triton.projected_tile import projected_bias
from relpos.attend.triton.rank_one_tile import load_totals, load_weights, rank_one_bias
from relpos.attend.triton.scaled_tile import scaled_bias
from relpos.attend.triton.tiles import load_entries, load_tile
from relpos.attend.triton.toeplitz_tile import toeplitz_bias

C_TOEPLITZ = tl.constexpr(toeplitz_tile.BIT)
C_RANK_ONE = tl.constexpr(rank_one_tile.BIT)
C_SCALED = tl.constexpr(scaled_tile.BIT)
C_QUERY_VECTORS = tl.constexpr(projected_tile.QUERY_BIT)
C_KEY_VECTORS = tl.constexpr(projected_tile.KEY_BIT)


@triton.jit
def load_rows(TOTALS, INVERSE, QUERY_VECTORS, b, head, row0, start, queries, tokens, totals_heads, inverse_b,
              R: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr, FORM: tl.constexpr):  # fmt: skip
    """What a block of queries needs of the forms: totals, weight, inverse factor, vectors. Unused ones are indices."""
    r = row0 + tl.arange(0, BM)
    high, low, weight, inverse, vectors = r, r, r, r, r
    if C_RANK_ONE & FORM:
        high, low = load_totals(TOTALS, head, start + r, tokens, totals_heads)
        weight = load_weights(TOTALS, head, start + r, tokens, totals_heads)
    if C_SCALED & FORM:
        inverse = tl.load(INVERSE + b * inverse_b + tl.minimum(r, queries - 1))
    if C_QUERY_VECTORS & FORM:
        vectors = load_tile(QUERY_VECTORS + head * queries * R, row0, R, queries, BM, R, BR)
    return high, low, weight, inverse, vectors


@triton.jit
def load_columns(TOTALS, KEY_VECTORS, head, key0, keys, tokens, totals_heads,
                 R: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, FORM: tl.constexpr):  # fmt: skip
    """What a block of keys needs of the forms: totals, vectors."""
    j = key0 + tl.arange(0, BN)
    high, low, vectors = j, j, j
    if C_RANK_ONE & FORM:
        high, low = load_totals(TOTALS, head, j, tokens, totals_heads)
    if C_KEY_VECTORS & FORM:
        vectors = load_tile(KEY_VECTORS + head * keys * R, key0, R, keys, BN, R, BR)
    return high, low, vectors


@triton.jit
def add_bias(s, distance, apart, high_i, low_i, weight_i, inverse_i, u, high_j, low_j, w,
             TABLE, CURVE, HINGES, QUERY_RELATIVE, KEY_RELATIVE, zero, curve_zero, relative_zero,
             KNOTS: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, B: tl.constexpr, FORM: tl.constexpr,
             SYMMETRIC: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Scores plus bias, in log2. `distance` is i − j of each score, `apart` that of the tile's first query and key.

    Pointers are those of the head; u and w are the vectors of the tile's queries and keys.
    """
    if C_TOEPLITZ & FORM:
        s += toeplitz_bias(TABLE, zero + distance)
    if C_RANK_ONE & FORM:
        s += rank_one_bias(high_i, low_i, weight_i, high_j, low_j, SYMMETRIC)
    if C_SCALED & FORM:
        s += scaled_bias(load_entries(CURVE + curve_zero + distance) * inverse_i, HINGES, KNOTS)
    if C_QUERY_VECTORS & FORM:
        bias = projected_bias(u, QUERY_RELATIVE, relative_zero + apart - (B - 1), R, BR, B, False, PRECISION)
        s += tl.trans(bias) if TRANSPOSED else bias
    if C_KEY_VECTORS & FORM:
        bias = projected_bias(w, KEY_RELATIVE, relative_zero + apart - (B - 1), R, BR, B, True, PRECISION)
        s += bias if TRANSPOSED else tl.trans(bias)
    return s
