"""The bias of a tile: the sum of every form that the constant FORM has a bit of.

Index and row values broadcast to the tile, so that one function serves tiles (queries, keys) and (keys, queries).
"""

import triton
import triton.language as tl

from relpos.attend.triton import projected_tile, rank_one_tile, scaled_tile, toeplitz_tile
from relpos.attend.triton.projected_tile import projected_bias
from relpos.attend.triton.rank_one_tile import between, rank_one_bias
from relpos.attend.triton.scaled_tile import scaled_bias
from relpos.attend.triton.tiles import load_tile
from relpos.attend.triton.toeplitz_tile import load_distances

C_TOEPLITZ = tl.constexpr(toeplitz_tile.BIT)
C_RANK_ONE = tl.constexpr(rank_one_tile.BIT)
C_SCALED = tl.constexpr(scaled_tile.BIT)
C_QUERY_VECTORS = tl.constexpr(projected_tile.QUERY_BIT)
C_KEY_VECTORS = tl.constexpr(projected_tile.KEY_BIT)


@triton.jit
def load_rows(QUERY_GROWTH, WEIGHTS, INVERSE, QUERY_VECTORS, b, head, row0, queries, query_width, inverse_b,
              R: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr, FORM: tl.constexpr,
              WEIGHTED: tl.constexpr):  # fmt: skip
    """What a block of queries needs of the forms: weight, growth in its block, inverse factor, vectors.

    What no form needs are indices.
    """
    r = row0 + tl.arange(0, BM)
    weight, growth, inverse, vectors = r, r, r, r
    if C_RANK_ONE & FORM:
        growth = tl.load(QUERY_GROWTH + head * query_width + r)
        if WEIGHTED:
            weight = tl.load(WEIGHTS + head * query_width + r)
    if C_SCALED & FORM:
        inverse = tl.load(INVERSE + b * inverse_b + tl.minimum(r, queries - 1))
    if C_QUERY_VECTORS & FORM:
        vectors = load_tile(QUERY_VECTORS + head * queries * R, row0, R, queries, BM, R, BR)
    return weight, growth, inverse, vectors


@triton.jit
def load_columns(KEY_GROWTH, KEY_VECTORS, head, key0, keys, key_width,
                 R: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, FORM: tl.constexpr):  # fmt: skip
    """What a block of keys needs of the forms: growth in its block, vectors."""
    j = key0 + tl.arange(0, BN)
    growth, vectors = j, j
    if C_RANK_ONE & FORM:
        growth = tl.load(KEY_GROWTH + head * key_width + j)
    if C_KEY_VECTORS & FORM:
        vectors = load_tile(KEY_VECTORS + head * keys * R, key0, R, keys, BN, R, BR)
    return growth, vectors


@triton.jit
def totals_apart(QUERY_BASES, KEY_BASES, head, row0, key0, query_width, key_width, BM: tl.constexpr, BN: tl.constexpr,
                 FORM: tl.constexpr):  # fmt: skip
    """The total of a tile's first query minus that of its first key."""
    apart = 0.0
    if C_RANK_ONE & FORM:
        apart = between(QUERY_BASES, KEY_BASES, head, row0 // BM, key0 // BN, query_width // BM, key_width // BN)
    return apart


@triton.jit
def shifted_rows(x, weight, growth, FORM: tl.constexpr, WEIGHTED: tl.constexpr, SYMMETRIC: tl.constexpr):
    """A value per row plus what `tile_bias` leaves out of its logits, weight · growth."""
    if (C_RANK_ONE & FORM) and not SYMMETRIC:
        if WEIGHTED:
            growth = growth * weight
        x += growth
    return x


@triton.jit
def plus(bias, more, FORM: tl.constexpr, BIT: tl.constexpr):
    """The bias of the forms with lower bits, if there are any, plus that of one more. 0 + x would be an addition."""
    if (BIT - 1) & FORM:
        more += bias
    return more


@triton.jit
def tile_bias(i, j, apart, weight_i, growth_i, inverse_i, u, growth_j, w,
              TABLE, CURVE, HINGES, QUERY_RELATIVE, KEY_RELATIVE, zero, curve_zero, relative_zero,
              KNOTS: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, B: tl.constexpr, FORM: tl.constexpr,
              WEIGHTED: tl.constexpr, SYMMETRIC: tl.constexpr, TRANSPOSED: tl.constexpr,
              PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr):  # fmt: skip
    """The bias in log2, but for one number per row (`shifted_rows`); 0 without a form.

    The backward subtracts the level of a row from it before it is added to the scores: both are then one operation with
    the product before them. `apart` is the distance of the tile's first query and key. Pointers are those of the head;
    u and w are the vectors of the tile's queries and keys.
    """
    bias = 0.0
    if C_TOEPLITZ & FORM:
        bias = load_distances(TABLE + zero, i, j, ASSEMBLY)
    if C_RANK_ONE & FORM:
        bias = plus(bias, rank_one_bias(weight_i, growth_i, growth_j, WEIGHTED, SYMMETRIC), FORM, C_RANK_ONE)
    if C_SCALED & FORM:
        x = load_distances(CURVE + curve_zero, i, j, ASSEMBLY) * inverse_i
        bias = plus(bias, scaled_bias(x, HINGES, HINGES, KNOTS), FORM, C_SCALED)
    if C_QUERY_VECTORS & FORM:
        of_queries = projected_bias(u, QUERY_RELATIVE, relative_zero + apart - (B - 1), R, BR, B, False, PRECISION)
        bias = plus(bias, tl.trans(of_queries) if TRANSPOSED else of_queries, FORM, C_QUERY_VECTORS)
    if C_KEY_VECTORS & FORM:
        of_keys = projected_bias(w, KEY_RELATIVE, relative_zero + apart - (B - 1), R, BR, B, True, PRECISION)
        bias = plus(bias, of_keys if TRANSPOSED else tl.trans(of_keys), FORM, C_KEY_VECTORS)
    return bias
