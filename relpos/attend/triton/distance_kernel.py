"""Sums over all scores of equal distance: the gradient of a table, without atomics.

Scores at the same place in the tiles of one block diagonal have the same distance. So one program adds the tiles of its
diagonal, over rows and batch, as they are, in registers, and sums the diagonals inside the tile once, at the end.
"""

import triton
import triton.language as tl

from relpos.attend.triton.projected_tile import turned
from relpos.attend.triton.scaled_tile import scaled_slope
from relpos.attend.triton.tile_bias import (
    C_KEY_VECTORS,
    C_QUERY_VECTORS,
    C_SCALED,
    load_columns,
    load_rows,
    shifted_rows,
    tile_bias,
    totals_apart,
)
from relpos.attend.triton.tiles import (
    C_INFINITY,
    CHANGING,
    block_and_head,
    capped,
    dropped,
    head_hash,
    load_keys,
    load_tile,
    masked,
    product,
    row_interval,
    store_tile,
    wide,
)
from relpos.attend.triton.toeplitz_tile import load_distances


@triton.jit
def store_diagonals(at, tile, BM: tl.constexpr, BN: tl.constexpr):
    """Store the sums over the diagonals of a tile: BM / BN + 1 blocks of BN distances, the first from −BN on.

    Row a is turned so that its column x holds the score of key c = (a − x) mod BN, whose distance a − c is x modulo
    BN. Block t then has the distances x + (t − 1)·BN. BM is a multiple of BN, a power of two.
    """
    a, x = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    c = (a - x) & (BN - 1)
    columns = tl.gather(tile, c, 1)
    block = (a - c - x) // BN
    for t in tl.static_range(BM // BN + 1):
        tl.store(at + t * BN + tl.arange(0, BN), tl.sum(tl.where(block == t - 1, columns, 0.0), 0))


@triton.jit(do_not_specialize=CHANGING)
def distance_kernel(
    Q, K, V, GRAD, LEVEL, DELTA, PARTS, FIRST, END, ROW_KEYS, DIAGONALS, PADDING,
    TABLE, QUERY_GROWTH, QUERY_BASES, KEY_GROWTH, KEY_BASES, WEIGHTS, CURVE, INVERSE, HINGES, QUERY_VECTORS,
    QUERY_RELATIVE, KEY_VECTORS, KEY_RELATIVE,
    q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_m,
    blocks, batch, heads, group, queries, keys, start,
    interval_b, range_b, lowest, zero, table_h, query_width, key_width,
    curve_zero,
    inverse_b, relative_zero, query_relative_h, key_relative_h,
    scale, softcap, seed_high, seed_low, threshold, kept_factor,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, KNOTS: tl.constexpr, FORM: tl.constexpr, OF: tl.constexpr,
    WEIGHTED: tl.constexpr, SYMMETRIC: tl.constexpr, CAPPED: tl.constexpr, PADDED: tl.constexpr, DROPS: tl.constexpr,
    SKIPS: tl.constexpr, NARROWED: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """PARTS: the sums of one block diagonal, head and split; OF is the bit of the form whose gradient they are.

    Diagonal number n has the tiles with row0 − key0 = (lowest + n) · BN, of all batch entries, in a fixed order.
    DIAGONALS: the row blocks from its first tile that matters to its last; read with NARROWED.
    ROW_KEYS: first key and one past the last of each block of rows, (1 or batch, blocks, 2); read with SKIPS.
    """
    diagonal, h = block_and_head(blocks)
    split = tl.program_id(1)
    offset = lowest + diagonal  # (row0 − key0) / BN
    ratio: tl.constexpr = BM // BN
    row_blocks, key_blocks = tl.cdiv(queries, BM), tl.cdiv(keys, BN)
    low_block = tl.maximum(offset + ratio - 1, 0) // ratio  # the first row block whose key block exists
    high_block = tl.minimum(row_blocks, tl.maximum(key_blocks + offset + ratio - 1, 0) // ratio)
    if NARROWED:
        at = DIAGONALS + (h * blocks + diagonal) * 2
        low_block, high_block = tl.maximum(low_block, tl.load(at)), tl.minimum(high_block, tl.load(at + 1))
    count = tl.maximum(high_block - low_block, 0)  # tiles of one batch entry
    share = tl.cdiv(count * batch, tl.num_programs(1))
    TABLE += h * table_h
    HINGES += h * (4 * KNOTS)
    QUERY_RELATIVE += h * query_relative_h
    KEY_RELATIVE += h * key_relative_h
    acc = tl.zeros([BM, BN], tl.float32)
    near_acc = tl.zeros([BN, BR], tl.float32)
    far_acc = tl.zeros([BN, BR], tl.float32)
    for tile in range(split * share, tl.minimum((split + 1) * share, count * batch)):
        b = wide(tile // count)
        row_block = low_block + tile % count
        row0 = row_block * BM
        key0 = row0 - offset * BN
        wanted = True
        if SKIPS:  # packed documents: most tiles of a far diagonal are empty
            at = ROW_KEYS + b * range_b + row_block * 2
            wanted = (tl.load(at) < key0 + BN) & (tl.load(at + 1) > key0)
        if wanted:
            head = b * heads + h
            r = row0 + tl.arange(0, BM)
            i, j = (start + r)[:, None], (key0 + tl.arange(0, BN))[None, :]
            live = r < queries
            q = load_tile(Q + b * q_b + h * q_h, row0, q_m, queries, BM, D, BD)
            of_keys = PADDING + b * keys
            k, counts = load_keys(K + b * k_b + (h // group) * k_h, of_keys, key0, k_n, keys, BN, D, BD, PADDED)
            s = product(q, tl.trans(k), None, PRECISION)
            s, _ = capped(s, scale, softcap, CAPPED)
            weight, growth, inverse, u = load_rows(
                QUERY_GROWTH, WEIGHTS, INVERSE, QUERY_VECTORS, b, head, row0, queries, query_width, inverse_b, R, BR,
                BM,
                FORM, WEIGHTED,
            )  # fmt: skip
            apart = totals_apart(QUERY_BASES, KEY_BASES, head, row0, key0, query_width, key_width, BM, BN, FORM)
            growth_j, w = load_columns(KEY_GROWTH, KEY_VECTORS, head, key0, keys, key_width, R, BR, BN, FORM)
            bias = tile_bias(
                i, j, start + row0 - key0, weight[:, None], (growth + apart)[:, None], inverse[:, None], u,
                growth_j[None, :], w, TABLE, CURVE, HINGES, QUERY_RELATIVE, KEY_RELATIVE,
                zero, curve_zero, relative_zero, KNOTS, R, BR, BM, FORM, WEIGHTED, SYMMETRIC, False, PRECISION,
                ASSEMBLY,
            )  # fmt: skip
            first, end = row_interval(FIRST, END, b, r, queries, interval_b)
            level = tl.load(LEVEL + head * queries + r, mask=live, other=C_INFINITY)
            level = shifted_rows(level, weight, apart, FORM, WEIGHTED, SYMMETRIC)
            s += bias - level[:, None]
            p = tl.exp2(masked(s, j, first[:, None], end[:, None], counts[None, :], False, True))
            grad = load_tile(GRAD + b * g_b + h * g_h, row0, g_m, queries, BM, E, BE)
            v, _ = load_keys(V + b * v_b + (h // group) * v_h, of_keys, key0, v_n, keys, BN, E, BE, PADDED)
            dp = product(grad, tl.trans(v), None, PRECISION)
            dp = dropped(dp, head_hash(seed_high, seed_low, head), i, j, threshold, kept_factor, DROPS)
            delta = tl.load(DELTA + head * queries + r, mask=live, other=0.0)
            ds = p * (dp - delta[:, None])
            if OF == C_QUERY_VECTORS:
                near, far = turned(ds, BM, False)
                near_acc = product(tl.trans(near.to(u.dtype)), u, near_acc, PRECISION)
                far_acc = product(tl.trans(far.to(u.dtype)), u, far_acc, PRECISION)
            elif OF == C_KEY_VECTORS:
                near, far = turned(tl.trans(ds), BM, True)
                near_acc = product(tl.trans(near.to(w.dtype)), w, near_acc, PRECISION)
                far_acc = product(tl.trans(far.to(w.dtype)), w, far_acc, PRECISION)
            elif OF == C_SCALED:
                x = load_distances(CURVE + curve_zero, i, j, ASSEMBLY) * inverse[:, None]
                acc += ds * scaled_slope(x, HINGES, KNOTS) * inverse[:, None]
            else:
                acc += ds
    slot = (split * heads + h) * blocks + diagonal
    if OF >= C_QUERY_VECTORS:  # of vectors: 2·BN distances, the first −BN + 1
        at = PARTS + slot * (2 * BN * R)
        store_tile(at, 0, R, BN, near_acc, BN, R, BR)
        store_tile(at, BN, R, 2 * BN, far_acc, BN, R, BR)
    else:
        store_diagonals(PARTS + slot * ((ratio + 1) * BN), acc, BM, BN)
