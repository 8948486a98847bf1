"""Tiles that provably do not matter are left out: the loops of the kernels begin later and end earlier.

The promise is that of the native kernel (docs/attention.md, "What skipping promises"), its test is in tile_bounds.py.
Loads under a condition would not be pipelined, so no loop leaves out a tile in its middle.

Forward: `kept_keys_kernel` narrows the keys of each unit of queries to those from the first unit that matters to the
last. Sums over the queries (gradients of k, v and of running totals) multiply a weight by the gradient of the output
besides. So the backward measures the queries' factors, and `kept_rows_kernel` keeps more queries for a unit of keys, if
their factors exceed those of the kept tiles by more bits than they passed the test by (as native/src/demands.h does).

The host reads nothing, and memory is linear: one record per unit. The tests are (length / 64)² per head.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from relpos.attend.kernel_inputs import Inputs
from relpos.attend.triton import SHORTEST, rank_one_tile, toeplitz_tile
from relpos.attend.triton.gpu_problem import GpuProblem, form_bits
from relpos.attend.triton.tile_bias import C_RANK_ONE
from relpos.attend.triton.tile_bounds import (
    C_KEY_FIELDS,
    C_LANES,
    C_ROW_FIELDS,
    C_UNIT,
    KEY_FIELDS,
    ROW_FIELDS,
    UNIT,
    bias_bounds_kernel,
    bias_falls,
    highest,
    key_bounds_kernel,
    load_row_bounds,
    load_weights,
    log2_of,
    row_bounds,
    spare_bits,
)
from relpos.attend.triton.tile_sizes import TileSize
from relpos.attend.triton.tiles import (
    C_INFINITY,
    C_LARGEST_INDEX,
    C_NEGATIVE_INFINITY,
    CHANGING,
    block_and_head,
    key_range,
    load_tile,
    row_interval,
    wide,
)

BITS = 24.02  # a row loses less than 2^−24 of what it keeps; the rest is for rounding in the test
C_TOLERANCE = tl.constexpr(2.0)  # bits: similar gradients differ by about as much
# Fields of FACTORS: logarithms of the largest |g|, |g|·|q|, |g|·|weight|, |e|·|q| and |e|·|weight|, where g is the
# gradient of the output (|g| the sum of its entries' sizes) and e that of the log-sum-exp.
FACTORS = 5
C_FACTORS = tl.constexpr(FACTORS)


@triton.jit(do_not_specialize=CHANGING)
def kept_keys_kernel(
    Q, K, FIRST, END, PADDING, TABLE, TOKEN_TOTALS, TOKEN_WEIGHTS, TOPS, KEY_BOUNDS, KEY_SIZES, ROW_BOUNDS, KEPT_KEYS,
    q_b, q_h, q_m, k_b, k_h, k_n,
    blocks, heads, group, queries, keys, start, interval_b, zero, table_h, tokens, key_units, row_units, allowed, scale,
    D: tl.constexpr, BD: tl.constexpr, FORM: tl.constexpr, SYMMETRIC: tl.constexpr, GAINS: tl.constexpr,
    PADDED: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """KEPT_KEYS (batch · heads, units, 2): the first key that matters to a unit of queries, and one past the last."""
    unit, head = block_and_head(blocks)
    row0 = unit * C_UNIT
    b, h = head // heads, head % heads
    first, end = row_interval(FIRST, END, b, row0 + tl.arange(0, C_UNIT), queries, interval_b)
    begin, stop, _, _ = key_range(first, end, C_UNIT)
    kept_begin, kept_stop = begin // C_UNIT, tl.cdiv(stop, C_UNIT)
    if bias_falls(KEY_BOUNDS, TOPS, head, heads, key_units, row_units, allowed, FORM):
        low_unit, high_unit = kept_begin, kept_stop
        # The units of the queries' own keys, and the one before: of an own key alone, nothing is gained.
        kept_stop = tl.minimum((start + row0 + C_UNIT - 1) // C_UNIT + 1, high_unit)
        kept_begin = tl.maximum(tl.minimum((start + row0) // C_UNIT, kept_stop) - 1, low_unit)
        rows = row_bounds(
            Q + b * q_b + h * q_h, K + b * k_b + (h // group) * k_h, KEY_SIZES + (head // group) * 2 * keys,
            PADDING + b * keys, TABLE + h * table_h + zero, TOKEN_TOTALS + head * tokens, TOKEN_WEIGHTS + head * tokens,
            first, end, row0, kept_begin, kept_stop, q_m, k_n, queries, keys, start, scale,
            D, BD, FORM, SYMMETRIC, GAINS, PADDED, ASSEMBLY,
        )  # fmt: skip
        for field in tl.static_range(C_ROW_FIELDS):
            tl.store(ROW_BOUNDS + (head * C_ROW_FIELDS + field) * row_units + unit, rows[field])
        KEY_BOUNDS += head * (C_KEY_FIELDS * key_units)
        TOPS += h * (row_units + key_units)
        for n0 in range(low_unit, high_unit, C_LANES):
            n = n0 + tl.arange(0, C_LANES)
            bits = spare_bits(rows, KEY_BOUNDS, TOPS, unit, n, key_units, row_units, allowed, FORM, SYMMETRIC, GAINS)
            matters = (n < high_unit) & ((bits > 0.0) == 0)  # as a NaN does
            kept_begin = tl.minimum(kept_begin, tl.min(tl.where(matters, n, C_LARGEST_INDEX), 0))
            kept_stop = tl.maximum(kept_stop, tl.max(tl.where(matters, n + 1, 0), 0))
    at = KEPT_KEYS + (head * row_units + unit) * 2
    tl.store(at, tl.where(begin < stop, kept_begin * C_UNIT, C_LARGEST_INDEX))
    tl.store(at + 1, tl.minimum(kept_stop * C_UNIT, stop))


@triton.jit(do_not_specialize=CHANGING)
def row_factors_kernel(
    Q, GRAD, GRAD_LSE, FIRST, END, TOKEN_WEIGHTS, TOPS, KEY_BOUNDS, FACTORS, q_b, q_h, q_m, g_b, g_h, g_m,
    blocks, heads, queries, start, interval_b, tokens, key_units, row_units, allowed,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, FORM: tl.constexpr,
    SYMMETRIC: tl.constexpr, GAINS: tl.constexpr,
):  # fmt: skip
    """FACTORS (batch · heads, 5, units): what a unit's queries multiply weights by in sums over queries, in log2."""
    unit, head = block_and_head(blocks)
    row0 = unit * C_UNIT
    b, h = head // heads, head % heads
    if bias_falls(KEY_BOUNDS, TOPS, head, heads, key_units, row_units, allowed, FORM):
        r = row0 + tl.arange(0, C_UNIT)
        first, end = row_interval(FIRST, END, b, r, queries, interval_b)
        seen = (r < queries) & (first < end)
        q = load_tile(Q + b * q_b + h * q_h, row0, q_m, queries, C_UNIT, D, BD).to(tl.float32)
        grad = load_tile(GRAD + b * g_b + h * g_h, row0, g_m, queries, C_UNIT, E, BE).to(tl.float32)
        size = tl.sum(tl.abs(grad), 1)
        length = tl.sqrt(tl.sum(q * q, 1))
        of_lse = tl.abs(tl.load(GRAD_LSE + head * queries + r, mask=seen, other=0.0))
        weight = tl.zeros([C_UNIT], tl.float32)
        if C_RANK_ONE & FORM:
            token = head * tokens + start + tl.minimum(r, queries - 1)
            weight = tl.abs(load_weights(TOKEN_WEIGHTS, token, GAINS, SYMMETRIC))
        factors = (size, size * length, size * weight, of_lse * length, of_lse * weight)
        for field in tl.static_range(C_FACTORS):
            largest = highest(tl.where(seen, factors[field], 0.0))
            tl.store(FACTORS + (head * C_FACTORS + field) * row_units + unit, log2_of(largest))


@triton.jit(do_not_specialize=CHANGING)
def kept_rows_kernel(
    FIRST, END, TOPS, KEY_BOUNDS, ROW_BOUNDS, KEPT_KEYS, FACTORS, KEPT_ROWS,
    blocks, heads, queries, interval_b, key_units, row_units, allowed,
    FORM: tl.constexpr, SYMMETRIC: tl.constexpr, GAINS: tl.constexpr,
):  # fmt: skip
    """KEPT_ROWS (batch · heads, units, 2): the queries to which a unit of keys matters, in sums over queries too.

    They are those of its kept tiles at least. Another tile is kept if one of its factors exceeds the largest of these
    by more bits than it passed its test by, and by the tolerance besides.
    """
    unit, head = block_and_head(blocks)
    key0 = unit * C_UNIT
    lane = tl.arange(0, C_LANES)
    KEPT_KEYS += head * row_units * 2
    begin, stop = row_units, row_units * 0
    for m0 in range(0, row_units, C_LANES):
        m = m0 + lane
        low = tl.load(KEPT_KEYS + m * 2, mask=m < row_units, other=C_LARGEST_INDEX)
        high = tl.load(KEPT_KEYS + m * 2 + 1, mask=m < row_units, other=0)
        kept = (low < key0 + C_UNIT) & (high > key0)
        begin = tl.minimum(begin, tl.min(tl.where(kept, m, C_LARGEST_INDEX), 0))
        stop = tl.maximum(stop, tl.max(tl.where(kept, m + 1, 0), 0))
    kept_begin, kept_stop = begin, stop
    if bias_falls(KEY_BOUNDS, TOPS, head, heads, key_units, row_units, allowed, FORM):
        TOPS += head % heads * (row_units + key_units)
        KEY_BOUNDS += head * (C_KEY_FIELDS * key_units)
        ROW_BOUNDS += head * (C_ROW_FIELDS * row_units)
        field = tl.arange(0, 8)[:, None]  # of which there are 5
        factors = FACTORS + (head * C_FACTORS + field) * row_units
        met = tl.full([8, C_LANES], C_NEGATIVE_INFINITY, tl.float32)
        for m0 in range(begin, stop, C_LANES):
            m = (m0 + lane)[None, :]
            factor = tl.load(factors + m, mask=(m < stop) & (field < C_FACTORS), other=C_NEGATIVE_INFINITY)
            met = tl.maximum(met, tl.where(factor < C_INFINITY, factor, C_NEGATIVE_INFINITY))
        met_factor = tl.max(met, 1)[:, None]
        for m0 in range(0, row_units, C_LANES):
            m = m0 + lane
            last = tl.minimum(m * C_UNIT + (C_UNIT - 1), queries - 1)
            first, _ = row_interval(FIRST, END, head // heads, m * C_UNIT, queries, interval_b)
            _, end = row_interval(FIRST, END, head // heads, last, queries, interval_b)
            seen = (m < row_units) & (first < key0 + C_UNIT) & (end > key0)
            rows = load_row_bounds(ROW_BOUNDS, m, row_units)
            bits = spare_bits(rows, KEY_BOUNDS, TOPS, m, unit, key_units, row_units, allowed, FORM, SYMMETRIC, GAINS)
            bits = tl.where(bits > 1e30, 1e30, bits) + C_TOLERANCE  # finite, as no factor may be met; a NaN stays
            inside = (m < row_units)[None, :] & (field < C_FACTORS)
            factor = tl.load(factors + m[None, :], mask=inside, other=C_NEGATIVE_INFINITY)
            spared = (factor == C_NEGATIVE_INFINITY) | (factor <= met_factor + bits[None, :])
            demanded = seen & (tl.min(spared.to(tl.int32), 0) == 0)
            kept_begin = tl.minimum(kept_begin, tl.min(tl.where(demanded & (m < begin), m, C_LARGEST_INDEX), 0))
            kept_stop = tl.maximum(kept_stop, tl.max(tl.where(demanded & (m >= stop), m + 1, 0), 0))
    at = KEPT_ROWS + (head * key_units + unit) * 2
    tl.store(at, kept_begin * C_UNIT)
    tl.store(at + 1, tl.minimum(kept_stop * C_UNIT, queries))


@triton.jit(do_not_specialize=CHANGING)
def kept_diagonals_kernel(
    KEPT_KEYS, DIAGONALS, blocks, batch, heads, queries, keys, lowest, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """DIAGONALS (heads, diagonals, 2): the first row block with a kept tile on a block diagonal, one past the last.

    Diagonal n has the tiles with row0 − key0 = (lowest + n) · BN, of all batch entries.
    """
    diagonal, h = block_and_head(blocks)
    offset = (lowest + diagonal) * BN
    units, row_blocks = tl.cdiv(queries, C_UNIT), tl.cdiv(queries, BM)
    begin, stop = row_blocks, row_blocks * 0
    for b in range(0, batch):
        at = KEPT_KEYS + (wide(b) * heads + h) * units * 2
        for block0 in range(0, row_blocks, C_LANES):
            block = block0 + tl.arange(0, C_LANES)
            key0 = block * BM - offset
            for part in tl.static_range((BM + C_UNIT - 1) // C_UNIT):  # the units of a row block
                unit = block * BM // C_UNIT + part
                low = tl.load(at + unit * 2, mask=unit < units, other=C_LARGEST_INDEX)
                high = tl.load(at + unit * 2 + 1, mask=unit < units, other=0)
                kept = (block < row_blocks) & (low < key0 + BN) & (high > key0) & (key0 < keys) & (key0 >= 0)
                begin = tl.minimum(begin, tl.min(tl.where(kept, block, C_LARGEST_INDEX), 0))
                stop = tl.maximum(stop, tl.max(tl.where(kept, block + 1, 0), 0))
    at = DIAGONALS + (h * blocks + diagonal) * 2
    tl.store(at, begin)
    tl.store(at + 1, stop)


@triton.jit
def narrowed(KEPT, head, first, length, begin, stop, SIZE: tl.constexpr, STEP: tl.constexpr):
    """The interval [begin, stop) of a block, narrowed to what KEPT (heads, units, 2) has for its units.

    The block begins at `first` of `length` tokens, and has SIZE of them; the interval begins at a multiple of STEP.
    """
    units = tl.cdiv(length, C_UNIT)
    at = KEPT + head * units * 2
    low, high = tl.load(at + first // C_UNIT * 2), tl.load(at + first // C_UNIT * 2 + 1)
    for part in tl.static_range(1, (SIZE + C_UNIT - 1) // C_UNIT):
        unit = tl.minimum(first // C_UNIT + part, units - 1)
        low = tl.minimum(low, tl.load(at + unit * 2))
        high = tl.maximum(high, tl.load(at + unit * 2 + 1))
    return tl.maximum(begin, low // STEP * STEP), tl.minimum(stop, high)


# -- On the host


def may_skip(inputs: Inputs) -> bool:
    """Whether tiles of these forms may be skipped. A capped score or a weight that dropout multiplies has no bounds."""
    form, known = form_bits(inputs), toeplitz_tile.BIT | rank_one_tile.BIT
    return inputs.skip and form != 0 and not form & ~known and inputs.softcap == 0.0 and inputs.dropout == 0.0


def units(length: int) -> int:
    """The number of units of so many queries or keys."""
    return (length + UNIT - 1) // UNIT


def empty_record(inputs: Inputs) -> Tensor:
    """Room for what the backward reads; none if no tile may be skipped. Its size asks nothing about the length."""
    return inputs.q.new_zeros(sum(part_sizes(inputs).values()) if may_skip(inputs) else 0, dtype=torch.float32)


def part_sizes(inputs: Inputs) -> dict[str, int]:
    """The parts of a record, by the names of the kernels' arguments."""
    rows, keys = units(inputs.q.shape[2]), units(inputs.k.shape[2])
    batch, heads = inputs.q.shape[:2]
    every = batch * heads
    return {
        "KEPT_KEYS": every * rows * 2, "ROW_BOUNDS": every * rows * ROW_FIELDS, "KEY_BOUNDS": every * keys * KEY_FIELDS,
        "TOPS": heads * (rows + keys),
    }  # fmt: skip


def use_record(problem: GpuProblem, record: Tensor) -> bool:
    """Set the arguments of the kernels by a record; whether tiles are skipped."""
    inputs, queries, keys = problem.inputs, problem.inputs.q.shape[2], problem.inputs.k.shape[2]
    if not len(record) or keys < SHORTEST or queries < UNIT:
        return False
    sizes = part_sizes(inputs)
    parts = dict(zip(sizes, record.split(list(sizes.values())), strict=True))
    parts["KEPT_KEYS"] = parts["KEPT_KEYS"].view(torch.int32)
    problem.arguments |= parts | {
        "NARROWED": True, "GAINS": inputs.weight is not None, "row_units": units(queries), "key_units": units(keys),
        "allowed": -BITS - math.log2(max(keys, queries)),
    }  # fmt: skip
    totals, weights = (problem.arguments.get(name) for name in ("totals", "token_weights"))
    nothing = problem.arguments["TABLE"]
    problem.arguments |= {
        "TOKEN_TOTALS": nothing if totals is None else totals.contiguous(),
        "TOKEN_WEIGHTS": nothing if weights is None else weights.contiguous(),
        "tokens": 0 if totals is None else totals.shape[1],
    }
    return True


def keep_keys(problem: GpuProblem, record: Tensor) -> None:
    """Fill a record in the forward, and let the kernels read it."""
    if not use_record(problem, record):
        return
    batch, heads, queries, _ = problem.inputs.q.shape
    key_heads, keys, _ = problem.inputs.k.shape[1:]
    rows, columns = units(queries), units(keys)
    problem.arguments["KEY_SIZES"] = record.new_empty(batch * key_heads * 2 * keys)
    problem.launch(bias_bounds_kernel, (rows + columns, batch * heads), problem.size("skipping"))
    problem.launch(key_bounds_kernel, (columns, batch * key_heads), problem.size("skipping"))
    problem.launch(kept_keys_kernel, (rows, batch * heads), problem.size("skipping"))


def keep_diagonals(problem: GpuProblem, diagonals: int, lowest: int, size: TileSize) -> None:
    """In the backward, find the row blocks to which each block diagonal matters, for sums by distance."""
    if problem.arguments["NARROWED"]:
        heads = problem.inputs.q.shape[1]
        kept = problem.arguments["KEPT_KEYS"].new_empty(heads, diagonals, 2)
        problem.arguments["DIAGONALS"] = kept
        problem.launch(kept_diagonals_kernel, (diagonals, heads), size, lowest=lowest)


def keep_rows(problem: GpuProblem) -> None:
    """In the backward, find the queries to which each unit of keys matters."""
    if not problem.arguments["NARROWED"]:
        return
    batch, heads, queries, _ = problem.inputs.q.shape
    rows, columns = units(queries), units(problem.inputs.k.shape[2])
    factors = problem.inputs.q.new_empty(batch * heads * FACTORS * rows, dtype=torch.float32)
    kept = factors.new_empty(batch * heads * columns * 2, dtype=torch.int32)
    problem.arguments |= {"FACTORS": factors, "KEPT_ROWS": kept}
    problem.launch(row_factors_kernel, (rows, batch * heads), problem.size("skipping"))
    problem.launch(kept_rows_kernel, (columns, batch * heads), problem.size("skipping"))
