"""Decoding: few queries over many keys. Programs share the keys of a head; a second kernel combines their parts.

The rows of a program are the heads of a group times the queries, so that all heads of a group share one read of their
keys and values. A row has a head of its own, and with it a table, totals and hinges of its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from relpos.attend.kernel_inputs import Inputs
from relpos.attend.triton.forward_kernel import attend_to_tile
from relpos.attend.triton.gpu_problem import GpuProblem, processors
from relpos.attend.triton.rank_one_tile import bias_of_totals, load_totals
from relpos.attend.triton.scaled_tile import scaled_bias
from relpos.attend.triton.tile_bias import C_KEY_VECTORS, C_QUERY_VECTORS, C_RANK_ONE, C_SCALED, C_TOEPLITZ
from relpos.attend.triton.tiles import (
    C_INFINITY,
    C_LARGEST_INDEX,
    C_LOG2E,
    C_NEGATIVE_INFINITY,
    CHANGING,
    block_and_head,
    capped,
    head_hash,
    load_keys,
    masked,
    product,
    row_interval,
    wide,
)
from relpos.attend.triton.toeplitz_tile import load_distances

LEAST_TILES = 2  # of a split: fewer keys are not worth a program
MOST_SPLITS = 128
PROGRAMS_PER_PROCESSOR = 2


@triton.jit
def projected_rows(s, RELATIVE, VECTORS, row0, rows, g, b, heads, group, queries, keys, start, key0, relative_zero,
                   relative_h, R: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                   OF_KEYS: tl.constexpr):  # fmt: skip
    """Scores plus a Projected bias, one row after the other: its distances are no others' and its head's table too."""
    columns = tl.arange(0, BR)
    o = tl.arange(0, BN)
    for p in range(0, tl.minimum(BM, rows - row0)):
        h, r = g * group + (row0 + p) // queries, (row0 + p) % queries
        at = wide(relative_zero + start + r - key0) - o
        inside = columns[None, :] < R
        relative = tl.load(RELATIVE + h * relative_h + at[:, None] * R + columns[None, :], mask=inside, other=0.0)
        if OF_KEYS:
            token = (b * heads + h) * keys + key0 + o
            inside = inside & ((key0 + o)[:, None] < keys)
            vectors = tl.load(VECTORS + token[:, None] * R + columns[None, :], mask=inside, other=0.0)
        else:
            token = (b * heads + h) * queries + r
            vectors = tl.load(VECTORS + token * R + columns[None, :], mask=columns[None, :] < R, other=0.0)
        bias = tl.sum(relative.to(tl.float32) * vectors.to(tl.float32), 1) * C_LOG2E
        s += tl.where(tl.arange(0, BM)[:, None] == p, bias[None, :], 0.0)
    return s


@triton.jit(do_not_specialize=CHANGING)
def decoding_kernel(
    Q, K, V, PARTS, PART_LSE, FIRST, END, PADDING, TABLE, TOTALS, CURVE, INVERSE, HINGES,
    QUERY_VECTORS, QUERY_RELATIVE, KEY_VECTORS, KEY_RELATIVE,
    q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n,
    blocks, batch, heads, group, queries, keys, start,
    interval_b, zero, table_h, tokens, curve_zero, inverse_b, inverse_start,
    relative_zero, query_relative_h, key_relative_h, scale, softcap, seed_high, seed_low, threshold, kept_factor,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, KNOTS: tl.constexpr, FORM: tl.constexpr, SYMMETRIC: tl.constexpr,
    CAPPED: tl.constexpr, PADDED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """PARTS (splits, batch, heads, queries, E) and their log-sum-exp in log2, −inf where a split sees nothing.

    The splits divide the keys that the rows see, so that a window, or a document, reads no others.
    """
    key_heads = heads // group
    split, key_head = block_and_head(blocks)
    b, g = key_head // key_heads, key_head % key_heads
    row0 = tl.program_id(1) * BM
    rows = group * queries
    row = tl.minimum(row0 + tl.arange(0, BM), rows - 1)  # rows beyond the last repeat it, and need no other case
    r = row % queries
    h = g * group + row // queries  # (BM,), int64 as g is
    head = b * heads + h
    first, end = row_interval(FIRST, END, b, r, queries, interval_b)
    PADDING += b * keys
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    hashed = head_hash(seed_high, seed_low, head)[:, None]
    columns = tl.arange(0, BD)[None, :]
    q = tl.load(Q + b * q_b + (h * q_h + r * q_m)[:, None] + columns, mask=columns < D, other=0.0)
    i = (start + r)[:, None]
    if C_RANK_ONE & FORM:
        high, low, weight = load_totals(TOTALS, head[:, None], i, tokens, batch * heads)
    if C_SCALED & FORM:
        inverse = tl.load(INVERSE + b * inverse_b + inverse_start + r)[:, None]
        hinges = (HINGES + h * (4 * KNOTS))[:, None]
    table = (TABLE + h * table_h)[:, None]
    m = tl.full([BM], C_NEGATIVE_INFINITY, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BE], tl.float32)
    seen = first < end
    stop = tl.max(tl.where(seen, end, 0))
    begin = tl.minimum(tl.min(tl.where(seen, first, C_LARGEST_INDEX)), stop)
    inner, outer = tl.max(first), tl.min(end)
    share = tl.cdiv(tl.cdiv(stop - begin, BN), blocks) * BN
    begin += split * share
    for key0 in range(begin, tl.minimum(begin + share, stop), BN):
        j = (key0 + tl.arange(0, BN))[None, :]
        k, counts = load_keys(K, PADDING, key0, k_n, keys, BN, D, BD, PADDED)
        s = product(q, tl.trans(k), None, PRECISION)
        s, _ = capped(s, scale, softcap, CAPPED)
        if C_TOEPLITZ & FORM:
            s += load_distances(table + zero, i, j, ASSEMBLY)
        if C_RANK_ONE & FORM:
            high_j, low_j, _ = load_totals(TOTALS, head[:, None], j, tokens, batch * heads)
            s += bias_of_totals(high, low, weight, high_j, low_j, SYMMETRIC)
        if C_SCALED & FORM:
            s += scaled_bias(load_distances(CURVE + curve_zero, i, j, ASSEMBLY) * inverse, HINGES, hinges, KNOTS)
        if C_QUERY_VECTORS & FORM:
            s = projected_rows(
                s, QUERY_RELATIVE, QUERY_VECTORS, row0, rows, g, b, heads, group, queries, keys, start, key0,
                relative_zero, query_relative_h, R, BR, BM, BN, False,
            )  # fmt: skip
        if C_KEY_VECTORS & FORM:
            s = projected_rows(
                s, KEY_RELATIVE, KEY_VECTORS, row0, rows, g, b, heads, group, queries, keys, start, key0,
                relative_zero, key_relative_h, R, BR, BM, BN, True,
            )  # fmt: skip
        if (key0 < inner) | (key0 + BN > outer):
            s = masked(s, j, first[:, None], end[:, None], counts[None, :], False, PADDED)
        else:
            s = masked(s, j, first[:, None], end[:, None], counts[None, :], True, PADDED)
        v, _ = load_keys(V, PADDING, key0, v_n, keys, BN, E, BE, PADDED)
        m, total, acc = attend_to_tile(m, total, acc, s, 0.0, v, hashed, i, j, threshold, kept_factor, DROPS, PRECISION)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    live = row0 + tl.arange(0, BM) < rows
    at = wide(split) * (batch * heads * queries) + head * queries + r
    tl.store(PART_LSE + at, tl.where(empty, C_NEGATIVE_INFINITY, m + tl.log2(total)), mask=live)
    columns = tl.arange(0, BE)[None, :]
    tl.store(PARTS + at[:, None] * E + columns, acc / total[:, None], mask=live[:, None] & (columns < E))


@triton.jit(do_not_specialize=CHANGING)
def combining_kernel(
    PARTS, PART_LSE, OUT, LSE, SINKS, o_b, o_h, o_m, heads, queries, splits,
    E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """OUT and LSE, as of the forward, of one row: its parts, BM at a time in their order. A sink is one more part."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    head, r = row // queries, row % queries
    b, h = head // heads, head % heads
    columns = tl.arange(0, BE)
    m = tl.full([], C_NEGATIVE_INFINITY, tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([BE], tl.float32)
    if HAS_SINKS:
        m = tl.load(SINKS + h).to(tl.float32) * C_LOG2E
        total = tl.where(m == C_NEGATIVE_INFINITY, 0.0, 1.0)
    for split0 in range(0, splits, BM):
        split = split0 + tl.arange(0, BM)
        inside = split < splits
        at = wide(split) * rows + row
        lse = tl.load(PART_LSE + at, mask=inside, other=C_NEGATIVE_INFINITY)
        mask = inside[:, None] & (columns[None, :] < E)
        parts = tl.load(PARTS + at[:, None] * E + columns[None, :], mask=mask, other=0.0)
        new = tl.maximum(m, tl.max(lse, 0))
        safe = tl.where(new == C_NEGATIVE_INFINITY, 0.0, new)
        weights = tl.exp2(lse - safe)
        shrink = tl.exp2(m - safe)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * parts, 0)
        m = new
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tl.store(LSE + row, tl.where(empty, C_INFINITY, m + tl.log2(total)))
    tl.store(OUT + b * o_b + h * o_h + r * o_m + columns, (acc / total).to(OUT.dtype.element_ty), mask=columns < E)


def key_splits(programs: int, keys: int, processors: int, BN: int) -> int:
    """Number of programs among which the keys of a head are divided: of shapes and the GPU alone, never of timing."""
    wanted = -(-PROGRAMS_PER_PROCESSOR * processors // programs)
    return max(1, min(wanted, -(-keys // (LEAST_TILES * BN)), MOST_SPLITS))


def keys_seen(inputs: Inputs) -> int:
    """The most keys that all queries together can see, without documents."""
    keys, queries, right = inputs.k.shape[2], inputs.q.shape[2], 0 if inputs.causal else inputs.window_right
    if inputs.window_left < 0 or right < 0:
        return keys
    return min(keys, inputs.window_left + queries + right)


def decode(problem: GpuProblem, out: Tensor, lse: Tensor) -> None:
    """Write the output and the log-sum-exp, as the forward does, for few queries."""
    inputs = problem.inputs
    batch, heads, queries, _ = inputs.q.shape
    key_heads = inputs.k.shape[1]
    rows = heads // key_heads * queries
    size = problem.size("decoding", rows)
    programs = batch * key_heads, triton.cdiv(rows, size.BM)
    splits = key_splits(programs[0] * programs[1], keys_seen(inputs), processors(inputs.q.device), size.BN)
    parts = out.new_empty(splits, batch, heads, queries, inputs.v.shape[3], dtype=torch.float32)
    part_lse = out.new_empty(splits, batch, heads, queries, dtype=torch.float32)
    problem.launch(decoding_kernel, (splits, *programs), size, PARTS=parts, PART_LSE=part_lse)
    problem.set_strides("o", out)
    problem.launch(
        combining_kernel, (batch * heads * queries,), problem.size("combining"),
        PARTS=parts, PART_LSE=part_lse, OUT=out, LSE=lse, splits=splits,
    )  # fmt: skip
