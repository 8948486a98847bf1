"""The forward: one program per block of queries and head walks the keys that the block sees."""

import triton
import triton.language as tl

from relpos.attend.triton.skipped_tiles import narrowed
from relpos.attend.triton.tile_bias import load_columns, load_rows, shifted_rows, tile_bias, totals_apart
from relpos.attend.triton.tiles import (
    C_INFINITY,
    C_LOG2E,
    C_NEGATIVE_INFINITY,
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
)


@triton.jit
def attend_to_tile(m, total, acc, s, shift, v, hashed, i, j, threshold, kept_factor, DROPS: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """One step of the online softmax: the new maximum, sum and weighted values of the rows.

    The logits of a row are s − shift.
    """
    new = tl.maximum(m, tl.max(s, 1) - shift)
    safe = tl.where(new == C_NEGATIVE_INFINITY, 0.0, new)  # a row that has seen nothing yet: no inf − inf
    p = tl.exp2(s - (safe + shift)[:, None])
    shrink = tl.exp2(m - safe)
    total = total * shrink + tl.sum(p, 1)
    p = dropped(p, hashed, i, j, threshold, kept_factor, DROPS)
    return new, total, product(p.to(v.dtype), v, acc * shrink[:, None], PRECISION)


@triton.jit(do_not_specialize=CHANGING)
def forward_kernel(
    Q, K, V, OUT, LSE, FIRST, END, KEPT_KEYS, PADDING, SINKS, TABLE,
    QUERY_GROWTH, QUERY_BASES, KEY_GROWTH, KEY_BASES, WEIGHTS, CURVE, INVERSE, HINGES,
    QUERY_VECTORS, QUERY_RELATIVE, KEY_VECTORS, KEY_RELATIVE,
    q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_m,
    blocks, batch, heads, group, queries, keys, start,
    interval_b, zero, table_h, query_width, key_width, curve_zero, inverse_b,
    relative_zero, query_relative_h, key_relative_h, scale, softcap, seed_high, seed_low, threshold, kept_factor,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, KNOTS: tl.constexpr, FORM: tl.constexpr, WEIGHTED: tl.constexpr,
    SYMMETRIC: tl.constexpr, CAPPED: tl.constexpr, PADDED: tl.constexpr, HAS_SINKS: tl.constexpr, DROPS: tl.constexpr,
    NARROWED: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """OUT (batch, heads, queries, E), and LSE (batch, heads, queries) in log2, +inf for a row that sees nothing."""
    block, head = block_and_head(blocks)
    row0 = (blocks - 1 - block) * BM  # the longest rows first
    b, h = head // heads, head % heads
    r = row0 + tl.arange(0, BM)
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
    m = tl.full([BM], C_NEGATIVE_INFINITY, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BE], tl.float32)
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
            s = product(q, tl.trans(k), None, PRECISION)
            s, _ = capped(s, scale, softcap, CAPPED)
            apart = totals_apart(QUERY_BASES, KEY_BASES, head, row0, key0, query_width, key_width, BM, BN, FORM)
            growth_j, w = load_columns(KEY_GROWTH, KEY_VECTORS, head, key0, keys, key_width, R, BR, BN, FORM)
            bias = tile_bias(
                i, j, start + row0 - key0, weight[:, None], (growth + apart)[:, None], inverse[:, None], u,
                growth_j[None, :], w, TABLE, CURVE, HINGES, QUERY_RELATIVE, KEY_RELATIVE,
                zero, curve_zero, relative_zero, KNOTS, R, BR, BM, FORM, WEIGHTED, SYMMETRIC, False, PRECISION,
                ASSEMBLY,
            )  # fmt: skip
            s = masked(s + bias, j, first[:, None], end[:, None], counts[None, :], FULL, PADDED)
            v, _ = load_keys(V, PADDING, key0, v_n, keys, BN, E, BE, PADDED)
            shift = shifted_rows(0.0, weight, apart, FORM, WEIGHTED, SYMMETRIC)
            m, total, acc = attend_to_tile(
                m, total, acc, s, shift, v, hashed, i, j, threshold, kept_factor, DROPS, PRECISION
            )
    m = shifted_rows(m, weight, -growth, FORM, WEIGHTED, SYMMETRIC)
    if HAS_SINKS:  # one more logit, without a value
        sink = tl.load(SINKS + h).to(tl.float32) * C_LOG2E
        new = tl.maximum(m, sink)
        safe = tl.where(new == C_NEGATIVE_INFINITY, 0.0, new)
        shrink = tl.exp2(m - safe)
        total = total * shrink + tl.exp2(sink - safe)
        acc *= shrink[:, None]
        m = new
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    acc = acc / total[:, None]
    # +inf for a row that sees nothing, so that exp2(s − lse) = 0 in the backward.
    tl.store(LSE + head * queries + r, tl.where(empty, C_INFINITY, m + tl.log2(total)), mask=r < queries)
    store_tile(OUT + b * o_b + h * o_h, row0, o_m, queries, acc, BM, E, BE)
