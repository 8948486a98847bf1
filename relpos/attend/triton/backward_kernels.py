"""The backward: gradients of q by blocks of queries, of k and v by blocks of keys, each with the sums of the forms.

Every number is written by one program, which adds in a fixed order: two runs give the same bits.
"""

import triton
import triton.language as tl

from relpos.attend.triton.projected_tile import fold_vectors
from relpos.attend.triton.rank_one_tile import signed
from relpos.attend.triton.scaled_tile import fold_knots, scaled_slope
from relpos.attend.triton.skipped_tiles import narrowed
from relpos.attend.triton.tile_bias import (
    C_KEY_VECTORS,
    C_QUERY_VECTORS,
    C_RANK_ONE,
    C_SCALED,
    C_TOEPLITZ,
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
    full_tiles,
    head_hash,
    key_range,
    load_keys,
    load_tile,
    loop_range,
    masked,
    product,
    row_interval,
    store_tile,
    tile_start,
    wide,
)
from relpos.attend.triton.toeplitz_tile import load_distances


@triton.jit(do_not_specialize=CHANGING)
def grad_q_kernel(
    Q, K, V, OUT, GRAD, GRAD_LSE, LEVEL, DELTA, GRAD_Q, ROW_SUMS, ROW_GROWTH, ROW_INVERSE, KNOT_SUMS, FAR_SUMS,
    GRAD_QUERY_VECTORS, FIRST, END, KEPT_KEYS, PADDING, TABLE,
    QUERY_GROWTH, QUERY_BASES, KEY_GROWTH, KEY_BASES, WEIGHTS, RANKS, CURVE, INVERSE, HINGES,
    QUERY_VECTORS, QUERY_RELATIVE, KEY_VECTORS, KEY_RELATIVE,
    q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_m, g_b, g_h, g_m,
    blocks, batch, heads, group, queries, keys, start,
    tokens, interval_b, zero, table_h, query_width, key_width, curve_zero,
    inverse_b, relative_zero, query_relative_h, key_relative_h, far_low, far_high,
    scale, softcap, seed_high, seed_low, threshold, kept_factor,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, KNOTS: tl.constexpr, FORM: tl.constexpr, LEARNED: tl.constexpr,
    WEIGHTED: tl.constexpr, SYMMETRIC: tl.constexpr, CAPPED: tl.constexpr, PADDED: tl.constexpr, DROPS: tl.constexpr,
    HAS_ENDS: tl.constexpr, NARROWED: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """GRAD_Q, and DELTA = Σ grad · out − grad_lse of each query, which the other kernels read; and sums per query.

    LEARNED has the bits of the forms whose gradients are wanted. With HAS_ENDS a table is constant up to the distance
    far_low and from far_high on: FAR_SUMS has the sums of these scores.
    """
    block, head = block_and_head(blocks)
    row_block = blocks - 1 - block
    row0 = row_block * BM
    b, h = head // heads, head % heads
    r = row0 + tl.arange(0, BM)
    live = r < queries
    at_rows = head * queries + r
    first, end = row_interval(FIRST, END, b, r, queries, interval_b)
    weight, growth, inverse, u = load_rows(
        QUERY_GROWTH, WEIGHTS, INVERSE, QUERY_VECTORS, b, head, row0, queries, query_width, inverse_b, R, BR, BM,
        FORM, WEIGHTED,
    )  # fmt: skip
    TABLE += h * table_h
    HINGES += h * (4 * KNOTS)
    QUERY_RELATIVE += h * query_relative_h
    KEY_RELATIVE += h * key_relative_h
    PADDING += b * keys
    K += b * k_b + (h // group) * k_h
    V += b * v_b + (h // group) * v_h
    hashed = head_hash(seed_high, seed_low, head)
    q = load_tile(Q + b * q_b + h * q_h, row0, q_m, queries, BM, D, BD)
    grad = load_tile(GRAD + b * g_b + h * g_h, row0, g_m, queries, BM, E, BE)
    out = load_tile(OUT + b * o_b + h * o_h, row0, o_m, queries, BM, E, BE)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1) - tl.load(GRAD_LSE + at_rows, mask=live, other=0.0)
    tl.store(DELTA + at_rows, delta, mask=live)
    level = tl.load(LEVEL + at_rows, mask=live, other=C_INFINITY)
    acc = tl.zeros([BM, BD], tl.float32)
    sums = tl.zeros([BM], tl.float32)
    growth_sums = tl.zeros([BM], tl.float32)
    inverse_sums = tl.zeros([BM], tl.float32)
    far_before = tl.zeros([BM], tl.float32)
    far_after = tl.zeros([BM], tl.float32)
    knot_sums = tl.zeros([4, KNOTS], tl.float32)
    vectors = tl.zeros([BM, BR], tl.float32)
    begin, stop, inner, outer = key_range(first, end, BN)
    if NARROWED:
        begin, stop = narrowed(KEPT_KEYS, head, row0, queries, begin, stop, BM, BN)
    i = (start + r)[:, None]
    low, high = full_tiles(begin, stop, inner, outer, BN)
    for FULL in tl.static_range(2):
        first_tile, last_tile = loop_range(begin, stop, low, high, FULL)
        for at in range(first_tile, last_tile, BN):
            key0 = tile_start(at, low, high, FULL)
            j = (key0 + tl.arange(0, BN))[None, :]
            k, counts = load_keys(K, PADDING, key0, k_n, keys, BN, D, BD, PADDED)
            v, _ = load_keys(V, PADDING, key0, v_n, keys, BN, E, BE, PADDED)
            s = product(q, tl.trans(k), None, PRECISION)
            s, slope = capped(s, scale, softcap, CAPPED)
            apart = totals_apart(QUERY_BASES, KEY_BASES, head, row0, key0, query_width, key_width, BM, BN, FORM)
            since_key = (growth + apart)[:, None]  # of the tile
            growth_j, w = load_columns(KEY_GROWTH, KEY_VECTORS, head, key0, keys, key_width, R, BR, BN, FORM)
            bias = tile_bias(
                i, j, start + row0 - key0, weight[:, None], since_key, inverse[:, None], u,
                growth_j[None, :], w, TABLE, CURVE, HINGES, QUERY_RELATIVE, KEY_RELATIVE,
                zero, curve_zero, relative_zero, KNOTS, R, BR, BM, FORM, WEIGHTED, SYMMETRIC, False, PRECISION,
                ASSEMBLY,
            )  # fmt: skip
            s += bias - shifted_rows(level, weight, apart, FORM, WEIGHTED, SYMMETRIC)[:, None]
            p = tl.exp2(masked(s, j, first[:, None], end[:, None], counts[None, :], FULL, PADDED))
            dp = dropped(product(grad, tl.trans(v), None, PRECISION), hashed, i, j, threshold, kept_factor, DROPS)
            ds = p * (dp - delta[:, None])  # gradient of the logits
            if C_RANK_ONE & LEARNED:
                if SYMMETRIC:
                    sums += tl.sum(signed(ds, RANKS + head * tokens, i, j, tokens, SYMMETRIC), 1)
                    growth_sums += tl.sum(ds * tl.abs(since_key - growth_j[None, :]), 1)
                elif WEIGHTED:
                    growth_sums += tl.sum(ds * (since_key - growth_j[None, :]), 1)
            if C_SCALED & LEARNED:
                entry = load_distances(CURVE + curve_zero, i, j, ASSEMBLY)
                x = entry * inverse[:, None]
                inverse_sums += tl.sum(ds * scaled_slope(x, HINGES, KNOTS) * entry, 1)
                knot_sums = fold_knots(knot_sums, ds, x, HINGES, KNOTS)
            if C_QUERY_VECTORS & LEARNED:
                row = relative_zero + start + row0 - key0 - (BM - 1)
                vectors = fold_vectors(vectors, ds, QUERY_RELATIVE, row, u.dtype, R, BR, BM, False, PRECISION)
            if HAS_ENDS and (C_TOEPLITZ & LEARNED):
                far_before += tl.sum(tl.where(i - j <= far_low, ds, 0.0), 1)
                far_after += tl.sum(tl.where(i - j >= far_high, ds, 0.0), 1)
            acc = product((ds * slope).to(k.dtype), k, acc, PRECISION)
    store_tile(GRAD_Q + head * queries * D, row0, D, queries, acc * scale, BM, D, BD)
    if C_RANK_ONE & LEARNED:
        if SYMMETRIC:
            tl.store(ROW_SUMS + at_rows, sums, mask=live)
        if WEIGHTED:
            tl.store(ROW_GROWTH + at_rows, growth_sums, mask=live)
    if C_SCALED & LEARNED:
        tl.store(ROW_INVERSE + at_rows, inverse_sums, mask=live)
        at = tl.arange(0, 4)[:, None] * KNOTS + tl.arange(0, KNOTS)[None, :]
        tl.store(KNOT_SUMS + (head * blocks + row_block) * (4 * KNOTS) + at, knot_sums)
    if C_QUERY_VECTORS & LEARNED:
        store_tile(GRAD_QUERY_VECTORS + head * queries * R, row0, R, queries, vectors, BM, R, BR)
    if HAS_ENDS and (C_TOEPLITZ & LEARNED):
        tl.store(FAR_SUMS + at_rows, far_before, mask=live)
        tl.store(FAR_SUMS + wide(batch * heads) * queries + at_rows, far_after, mask=live)


@triton.jit(do_not_specialize=CHANGING)
def grad_kv_kernel(
    Q, K, V, GRAD, LEVEL, DELTA, GRAD_K, GRAD_V, KEY_SUMS, GRAD_KEY_VECTORS, FIRST, END, RANGES, KEPT_ROWS, PADDING,
    TABLE, QUERY_GROWTH, QUERY_BASES, KEY_GROWTH, KEY_BASES, WEIGHTS, RANKS, CURVE, INVERSE, HINGES,
    QUERY_VECTORS, QUERY_RELATIVE, KEY_VECTORS, KEY_RELATIVE,
    q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_m,
    blocks, batch, heads, group, queries, keys, start,
    tokens, interval_b, range_b, zero, table_h, query_width, key_width,
    curve_zero, inverse_b,
    relative_zero, query_relative_h, key_relative_h, scale, softcap, seed_high, seed_low, threshold, kept_factor,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, KNOTS: tl.constexpr, FORM: tl.constexpr, LEARNED: tl.constexpr,
    WEIGHTED: tl.constexpr, SYMMETRIC: tl.constexpr, CAPPED: tl.constexpr, PADDED: tl.constexpr, DROPS: tl.constexpr,
    NARROWED: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """GRAD_K, GRAD_V and sums per key. Tiles are (keys, queries): nothing is transposed but what is loaded.

    RANGES has the rows that see each block of keys, (1 or batch, blocks, 4): begin, stop, and those that see all of it.
    """
    block, key_head = block_and_head(blocks)
    key0 = block * BN
    key_heads = heads // group
    b, g = key_head // key_heads, key_head % key_heads
    j = (key0 + tl.arange(0, BN))[:, None]
    PADDING += b * keys
    k, counts = load_keys(K + b * k_b + g * k_h, PADDING, key0, k_n, keys, BN, D, BD, PADDED)
    v, _ = load_keys(V + b * v_b + g * v_h, PADDING, key0, v_n, keys, BN, E, BE, PADDED)
    grad_k = tl.zeros([BN, BD], tl.float32)
    grad_v = tl.zeros([BN, BE], tl.float32)
    RANGES += b * range_b + block * 4
    begin, stop, inner, outer = tl.load(RANGES), tl.load(RANGES + 1), tl.load(RANGES + 2), tl.load(RANGES + 3)
    for member in range(0, group):  # the heads that share these keys, one after the other
        h = g * group + member
        head = b * heads + h
        hashed = head_hash(seed_high, seed_low, head)
        growth_j, w = load_columns(KEY_GROWTH, KEY_VECTORS, head, key0, keys, key_width, R, BR, BN, FORM)
        sums = tl.zeros([BN], tl.float32)
        vectors = tl.zeros([BN, BR], tl.float32)
        begin_row, stop_row = begin, stop
        if NARROWED:
            begin_row, stop_row = narrowed(KEPT_ROWS, head, key0, keys, begin, stop, BN, BM)
        low, high = full_tiles(begin_row, stop_row, inner, outer, BM)
        for FULL in tl.static_range(2):
            first_tile, last_tile = loop_range(begin_row, stop_row, low, high, FULL)
            for at in range(first_tile, last_tile, BM):
                row0 = tile_start(at, low, high, FULL)
                r = row0 + tl.arange(0, BM)
                live = r < queries
                i = (start + r)[None, :]
                q = load_tile(Q + b * q_b + h * q_h, row0, q_m, queries, BM, D, BD)
                grad = load_tile(GRAD + b * g_b + h * g_h, row0, g_m, queries, BM, E, BE)
                weight, growth, inverse, u = load_rows(
                    QUERY_GROWTH, WEIGHTS, INVERSE, QUERY_VECTORS, b, head, row0, queries, query_width, inverse_b, R,
                    BR, BM, FORM, WEIGHTED,
                )  # fmt: skip
                apart = totals_apart(QUERY_BASES, KEY_BASES, head, row0, key0, query_width, key_width, BM, BN, FORM)
                s = product(k, tl.trans(q), None, PRECISION)  # (BN, BM)
                s, slope = capped(s, scale, softcap, CAPPED)
                bias = tile_bias(
                    i, j, start + row0 - key0, weight[None, :], growth[None, :], inverse[None, :], u,
                    (growth_j - apart)[:, None], w, TABLE + h * table_h, CURVE, HINGES + h * (4 * KNOTS),
                    QUERY_RELATIVE + h * query_relative_h, KEY_RELATIVE + h * key_relative_h,
                    zero, curve_zero, relative_zero, KNOTS, R, BR, BM, FORM, WEIGHTED, SYMMETRIC, True, PRECISION,
                ASSEMBLY,
                )  # fmt: skip
                first, end = row_interval(FIRST, END, b, r, queries, interval_b)
                level = tl.load(LEVEL + head * queries + r, mask=live, other=C_INFINITY)
                s += bias - level[None, :]
                p = tl.exp2(masked(s, j, first[None, :], end[None, :], counts[:, None], FULL, PADDED))
                kept = dropped(p, hashed, i, j, threshold, kept_factor, DROPS)
                grad_v = product(kept.to(grad.dtype), grad, grad_v, PRECISION)
                dp = dropped(product(v, tl.trans(grad), None, PRECISION), hashed, i, j, threshold, kept_factor, DROPS)
                delta = tl.load(DELTA + head * queries + r, mask=live, other=0.0)
                ds = p * (dp - delta[None, :])
                if C_RANK_ONE & LEARNED:
                    moved = signed(ds, RANKS + head * tokens, i, j, tokens, SYMMETRIC)
                    if WEIGHTED:
                        moved = moved * weight[None, :]
                    sums += tl.sum(moved, 1)
                if C_KEY_VECTORS & LEARNED:
                    row = relative_zero + start + row0 - key0 - (BM - 1)
                    relative = KEY_RELATIVE + h * key_relative_h
                    vectors = fold_vectors(vectors, ds, relative, row, w.dtype, R, BR, BM, True, PRECISION)
                grad_k = product((ds * slope).to(q.dtype), q, grad_k, PRECISION)
        if C_RANK_ONE & LEARNED:
            inside = (key0 + tl.arange(0, BN)) < keys
            tl.store(KEY_SUMS + head * keys + key0 + tl.arange(0, BN), sums, mask=inside)
        if C_KEY_VECTORS & LEARNED:
            store_tile(GRAD_KEY_VECTORS + head * keys * R, key0, R, keys, vectors, BN, R, BR)
    store_tile(GRAD_K + key_head * keys * D, key0, D, keys, grad_k * scale, BN, D, BD)
    store_tile(GRAD_V + key_head * keys * E, key0, E, keys, grad_v, BN, E, BE)
