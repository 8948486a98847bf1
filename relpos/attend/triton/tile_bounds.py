"""Bounds of units of queries and keys, and the test that a tile passes if it provably does not matter.

With w_ij the weights of row i, an entry may be skipped if, for every X_ij by which a weight is multiplied in a sum over
the keys,

    w_ij · X_ij < 2^−24 / length · Σ_j w_ij · X_ij,    X = 1, |v_j|, |k_j|, |k_j|·|v_j|
                                                     and gained_ij, gained_ij·|v_j| where the bias has a weight_i.

The left side is bounded from above, for UNIT queries and UNIT keys together: the logits by Cauchy–Schwarz (|q_i| times
the radius of the keys about a common centre, plus q_i·centre) and the largest bias of the tile, X by its maximum over
the keys. The right side is bounded from below by the sums over the nearest keys, which are computed. Every test reads
"passes", so a NaN never skips. |v| is the largest entry of a value, |k| the length of a key; logits are in log2.
"""

import triton
import triton.language as tl

from relpos.attend.triton import toeplitz_tile
from relpos.attend.triton.tile_bias import C_RANK_ONE, C_TOEPLITZ
from relpos.attend.triton.tiles import (
    C_INFINITY,
    C_LOG2E,
    C_NEGATIVE_INFINITY,
    CHANGING,
    block_and_head,
    load_keys,
    load_tile,
    masked,
    product,
    wide,
)
from relpos.attend.triton.toeplitz_tile import load_distances

UNIT = 64
C_UNIT = tl.constexpr(UNIT)
C_LANES = tl.constexpr(128)  # units that are tested together
C_TABLE_PAD = tl.constexpr(toeplitz_tile.PAD)
C_SMALLEST = tl.constexpr(1e-37)
# Fields of KEY_BOUNDS, (batch · heads, fields, units): the largest distance from the centre, logarithms of the largest
# |v|, |k| and |k|·|v|; the smallest and the largest total, each as a sum of two floats; the largest |weight|.
KEY_FIELDS = 9
C_KEY_FIELDS = tl.constexpr(KEY_FIELDS)
C_RADIUS, C_VALUE, C_KEY, C_BOTH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
C_BOTTOM, C_TOP, C_HEAVIEST = tl.constexpr(4), tl.constexpr(6), tl.constexpr(8)
# Fields of ROW_BOUNDS: the largest |q|; the largest q·centre − log2 Σ w·X for the six X above, in their order; the
# smallest and the largest total, each as a sum of two floats; the smallest and the largest weight.
ROW_FIELDS = 13
C_ROW_FIELDS = tl.constexpr(ROW_FIELDS)


@triton.jit
def highest(x):
    """The largest number; +inf if one is NaN, which tl.max leaves out."""
    return tl.max(tl.where(x < C_INFINITY, x, C_INFINITY), 0)


@triton.jit
def log2_of(x):
    """log2 of what is not negative; −inf for 0."""
    return tl.where(x < C_SMALLEST, C_NEGATIVE_INFINITY, tl.log2(tl.maximum(x, C_SMALLEST)))


@triton.jit
def log2_above(x):
    """An upper bound of log2 of what is not negative, always larger than −inf."""
    return tl.log2(tl.maximum(x, C_SMALLEST)) + 1e-5


@triton.jit
def load_field(BOUNDS, field, unit, units):
    """One field of units of a head; 0 beyond them."""
    return tl.load(BOUNDS + field * units + unit, mask=(unit >= 0) & (unit < units), other=0.0)


@triton.jit
def split(total):
    """A total in float64 as a sum of two floats. Of an infinite one the second is NaN, so that no test passes."""
    high = total.to(tl.float32)
    return high, (total - high.to(tl.float64)).to(tl.float32)


@triton.jit
def range_of(total, counts):
    """The smallest and the largest of the totals that count, each as a sum of two floats."""
    bottom_high, bottom_low = split(-highest(tl.where(counts, -total, C_NEGATIVE_INFINITY)))
    top_high, top_low = split(highest(tl.where(counts, total, C_NEGATIVE_INFINITY)))
    return bottom_high, bottom_low, top_high, top_low


@triton.jit
def load_weights(TOKEN_WEIGHTS, at, GAINS: tl.constexpr, SYMMETRIC: tl.constexpr):
    """The factors of the totals of tokens in a bias in log2; without weights the totals have it, unless symmetric."""
    weight = at * 0.0 + (C_LOG2E if SYMMETRIC else 1.0)
    if GAINS:
        weight = tl.load(TOKEN_WEIGHTS + at)
    return weight


@triton.jit
def load_centre(K, PADDING, k_n, keys, D: tl.constexpr, BD: tl.constexpr, PADDED: tl.constexpr):
    """The mean of some keys: (BD,). Bounds hold about any centre; about this one a common offset loosens none."""
    j, columns = tl.arange(0, C_UNIT) * (keys // C_UNIT), tl.arange(0, BD)
    counts = j < keys
    if PADDED:
        counts = counts & (tl.load(PADDING + j, mask=counts, other=0) != 0)
    at = K + wide(j)[:, None] * k_n + columns[None, :]
    k = tl.load(at, mask=counts[:, None] & (columns[None, :] < D), other=0.0).to(tl.float32)
    centre = tl.sum(k, 0) * (1.0 / C_UNIT)
    return tl.where(tl.abs(centre) < 1e18, centre, 0.0)


@triton.jit
def bias_falls(KEY_BOUNDS, TOPS, head, heads, key_units, row_units, allowed, FORM: tl.constexpr):
    """Whether the bias of a head falls by the bits that a tile needs to pass. If not, looking for one does not pay."""
    lane = tl.arange(0, C_LANES)
    fall = tl.full([], 0.0, tl.float32)
    if C_TOEPLITZ & FORM:
        low = tl.full([C_LANES], C_INFINITY, tl.float32)
        high = tl.full([C_LANES], C_NEGATIVE_INFINITY, tl.float32)
        offsets = row_units + key_units
        for o in range(0, offsets, C_LANES):
            top = tl.load(TOPS + (head % heads) * offsets + o + lane, mask=o + lane < offsets, other=C_INFINITY)
            low = tl.minimum(low, top)
            high = tl.maximum(high, tl.where(top < C_INFINITY, top, C_NEGATIVE_INFINITY))
        fall += tl.max(high, 0) - tl.min(low, 0)
    if C_RANK_ONE & FORM:
        bottom = tl.full([C_LANES], C_INFINITY, tl.float32)
        top = tl.full([C_LANES], C_NEGATIVE_INFINITY, tl.float32)
        heaviest = tl.zeros([C_LANES], tl.float32)
        at = KEY_BOUNDS + head * (C_KEY_FIELDS * key_units)
        for n0 in range(0, key_units, C_LANES):
            n = n0 + lane
            bottom = tl.minimum(bottom, tl.where(n < key_units, load_field(at, C_BOTTOM, n, key_units), C_INFINITY))
            top = tl.maximum(top, tl.where(n < key_units, load_field(at, C_TOP, n, key_units), C_NEGATIVE_INFINITY))
            heaviest = tl.maximum(heaviest, load_field(at, C_HEAVIEST, n, key_units))
        fall += (tl.max(top, 0) - tl.min(bottom, 0)) * tl.max(heaviest, 0)
    return fall >= -allowed


@triton.jit
def spare_bits(rows, KEY_BOUNDS, TOPS, m, n, key_units, row_units, allowed, FORM: tl.constexpr,
               SYMMETRIC: tl.constexpr, GAINS: tl.constexpr):  # fmt: skip
    """The number of bits by which tiles pass the test; not above 0, or NaN, if they do not pass.

    m and n are units of queries and of keys: one is an index, the other many. `rows` are the bounds of m. Pointers are
    those of the head.
    """
    (
        norm, of_mass, of_value, of_key, of_both, of_gained, of_gained_value, lowest_high, lowest_low, highest_high,
        highest_low, light, heavy,
    ) = rows  # fmt: skip
    value = load_field(KEY_BOUNDS, C_VALUE, n, key_units)
    worst = tl.maximum(of_mass, of_value + value)
    worst = tl.maximum(worst, of_key + load_field(KEY_BOUNDS, C_KEY, n, key_units))
    worst = tl.maximum(worst, of_both + load_field(KEY_BOUNDS, C_BOTH, n, key_units))
    logit = norm * load_field(KEY_BOUNDS, C_RADIUS, n, key_units)
    if C_TOEPLITZ & FORM:
        logit += load_field(TOPS, 0, m - n + (key_units - 1), row_units + key_units)
    if C_RANK_ONE & FORM:
        top_high = load_field(KEY_BOUNDS, C_TOP, n, key_units)
        top_low = load_field(KEY_BOUNDS, C_TOP + 1, n, key_units)
        bottom_high = load_field(KEY_BOUNDS, C_BOTTOM, n, key_units)
        bottom_low = load_field(KEY_BOUNDS, C_BOTTOM + 1, n, key_units)
        least = (lowest_high - top_high) + (lowest_low - top_low)  # gained between the two
        most = (highest_high - bottom_high) + (highest_low - bottom_low)
        farthest = tl.maximum(tl.abs(least), tl.abs(most))
        logit = tl.where((tl.abs(least) < C_INFINITY) & (tl.abs(most) < C_INFINITY), logit, C_INFINITY)
        if SYMMETRIC:
            least = tl.maximum(tl.maximum(least, -most), 0.0)
            most = farthest
        bias = tl.maximum(-light * least, -light * most)  # a weight may have either sign
        bias = tl.maximum(bias, tl.maximum(-heavy * least, -heavy * most))
        logit += bias + tl.abs(bias) * 1e-6
        if GAINS:
            distance = log2_above(farthest)
            worst = tl.maximum(worst, tl.maximum(of_gained + distance, of_gained_value + distance + value))
    return allowed - (logit + worst)


@triton.jit(do_not_specialize=CHANGING)
def bias_bounds_kernel(
    TABLE, TOKEN_TOTALS, TOKEN_WEIGHTS, TOPS, KEY_BOUNDS, blocks, heads, keys, start, tokens, zero, table_h, key_units,
    row_units, FORM: tl.constexpr, SYMMETRIC: tl.constexpr, GAINS: tl.constexpr,
):  # fmt: skip
    """The largest entry of a table on each diagonal of tiles, TOPS (heads, offsets), and the totals of each unit.

    Offset o has the tiles of query unit m and key unit n with m − n = o − (key_units − 1), and +inf if the table has no
    such distance.
    """
    unit, head = block_and_head(blocks)
    offsets = row_units + key_units
    if C_TOEPLITZ & FORM:  # noqa: SIM102  (known to the compiler)
        if (head < heads) & (unit < offsets):
            away = tl.arange(0, 2 * C_UNIT) - (C_UNIT - 1)
            column = zero + start + (unit - (key_units - 1)) * C_UNIT + away
            inside = (away < C_UNIT) & (column >= C_TABLE_PAD) & (column < table_h - C_TABLE_PAD)
            entry = tl.load(TABLE + head * table_h + column, mask=inside, other=C_NEGATIVE_INFINITY)
            top = tl.where(tl.max(inside.to(tl.int32), 0) > 0, highest(entry), C_INFINITY)
            tl.store(TOPS + head * offsets + unit, top)
    if C_RANK_ONE & FORM:  # noqa: SIM102
        if unit < key_units:
            token = head * tokens + tl.minimum(unit * C_UNIT + tl.arange(0, C_UNIT), keys - 1)
            weight = load_weights(TOKEN_WEIGHTS, token, GAINS, SYMMETRIC)
            bottom_high, bottom_low, top_high, top_low = range_of(tl.load(TOKEN_TOTALS + token), token >= 0)
            at = KEY_BOUNDS + head * (C_KEY_FIELDS * key_units) + unit
            tl.store(at + C_BOTTOM * key_units, bottom_high)
            tl.store(at + (C_BOTTOM + 1) * key_units, bottom_low)
            tl.store(at + C_TOP * key_units, top_high)
            tl.store(at + (C_TOP + 1) * key_units, top_low)
            tl.store(at + C_HEAVIEST * key_units, highest(tl.abs(weight)))


@triton.jit(do_not_specialize=CHANGING)
def key_bounds_kernel(
    K, V, PADDING, TOPS, KEY_BOUNDS, KEY_SIZES, k_b, k_h, k_n, v_b, v_h, v_n,
    blocks, heads, group, keys, key_units, row_units, allowed,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, FORM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The sizes of each unit's keys and values, for all heads that share them, and KEY_SIZES of each key.

    KEY_SIZES (batch · key heads, 2, keys) has |k| and |v|; 0 if not finite, so that the sums of rows that do not see
    this key stay valid.
    """
    unit, key_head = block_and_head(blocks)
    key_heads = heads // group
    b, g = key_head // key_heads, key_head % key_heads
    head = b * heads + g * group
    falls = bias_falls(KEY_BOUNDS, TOPS, head, heads, key_units, row_units, allowed, FORM)
    for member in range(1, group):
        falls = falls | bias_falls(KEY_BOUNDS, TOPS, head + member, heads, key_units, row_units, allowed, FORM)
    if falls:
        PADDING += b * keys
        K += b * k_b + g * k_h
        V += b * v_b + g * v_h
        centre = load_centre(K, PADDING, k_n, keys, D, BD, PADDED)
        k, counts = load_keys(K, PADDING, unit * C_UNIT, k_n, keys, C_UNIT, D, BD, PADDED)
        v, _ = load_keys(V, PADDING, unit * C_UNIT, v_n, keys, C_UNIT, E, BE, PADDED)
        apart = k.to(tl.float32) - centre[None, :]
        farthest = highest(tl.where(counts, tl.sum(apart * apart, 1), 0.0))
        length = tl.sqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), 1))
        size = tl.abs(v.to(tl.float32))
        size = tl.max(tl.where(size < C_INFINITY, size, C_INFINITY), 1)
        both = highest((length + 1e-18) * size)
        j = unit * C_UNIT + tl.arange(0, C_UNIT)
        at_key = KEY_SIZES + key_head * 2 * keys + j
        tl.store(at_key, tl.where(length < C_INFINITY, length, 0.0), mask=j < keys)
        tl.store(at_key + keys, tl.where(size < C_INFINITY, size, 0.0), mask=j < keys)
        # Increased by the largest possible rounding error, also of products on tensor cores.
        radius = tl.sqrt(farthest + 1e-36) * (1.0 + 6e-5) + tl.sqrt(tl.sum(centre * centre, 0)) * 3e-5
        radius = tl.where((highest(size) < C_INFINITY) & (both < C_INFINITY), radius, C_INFINITY)
        for member in range(0, group):
            at = KEY_BOUNDS + (head + member) * (C_KEY_FIELDS * key_units) + unit
            tl.store(at + C_RADIUS * key_units, radius)
            tl.store(at + C_VALUE * key_units, log2_above(highest(size)))
            tl.store(at + C_KEY * key_units, log2_above(highest(length) + 1e-18))
            tl.store(at + C_BOTH * key_units, log2_above(both))


@triton.jit
def excess(centred, maximum, total, seen):
    """The largest q·centre − log2 Σ w·X of rows, where Σ w·X = 2^maximum · total; +inf if that is 0 in a row."""
    return highest(tl.where(seen, centred - (maximum + log2_of(total)), C_NEGATIVE_INFINITY))


@triton.jit
def row_bounds(Q, K, KEY_SIZES, PADDING, TABLE, TOKEN_TOTALS, TOKEN_WEIGHTS, first, end, row0, near_begin, near_stop,
               q_m, k_n, queries, keys, start, scale, D: tl.constexpr, BD: tl.constexpr, FORM: tl.constexpr,
               SYMMETRIC: tl.constexpr, GAINS: tl.constexpr, PADDED: tl.constexpr,
               ASSEMBLY: tl.constexpr):  # fmt: skip
    """The fields of ROW_BOUNDS for a unit of queries, from their sums over the units of keys [near_begin, near_stop).

    Pointers are those of the head, that of the table at distance 0; first and end are the intervals of the queries.
    """
    r = row0 + tl.arange(0, C_UNIT)
    token = start + tl.minimum(r, queries - 1)
    seen = (r < queries) & (first < end)
    q = load_tile(Q, row0, q_m, queries, C_UNIT, D, BD)
    centre = load_centre(K, PADDING, k_n, keys, D, BD, PADDED)
    norm = tl.sqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1) + 1e-36) * (tl.abs(scale) * C_LOG2E * 1.00001)
    centred = tl.sum(q.to(tl.float32) * centre[None, :], 1) * (scale * C_LOG2E)
    total, weight, growth_i = norm, norm, norm
    base = tl.full([], 0.0, tl.float64)
    if C_RANK_ONE & FORM:
        base = tl.load(TOKEN_TOTALS + start + row0)
        total = tl.load(TOKEN_TOTALS + token)
        weight = load_weights(TOKEN_WEIGHTS, token, GAINS, SYMMETRIC)
        growth_i = (total - base).to(tl.float32)
    m = tl.full([C_UNIT], C_NEGATIVE_INFINITY, tl.float32)
    mass = tl.zeros([C_UNIT], tl.float32)
    of_value = tl.zeros([C_UNIT], tl.float32)
    of_key = tl.zeros([C_UNIT], tl.float32)
    of_both = tl.zeros([C_UNIT], tl.float32)
    of_gained = tl.zeros([C_UNIT], tl.float32)
    of_gained_value = tl.zeros([C_UNIT], tl.float32)
    longest = tl.full([], 0.0, tl.float32)
    for n in range(near_begin, near_stop):
        key0 = n * C_UNIT
        j = (key0 + tl.arange(0, C_UNIT))[None, :]
        k, counts = load_keys(K, PADDING, key0, k_n, keys, C_UNIT, D, BD, PADDED)
        s = product(q, tl.trans(k), None, "tf32") * (scale * C_LOG2E)
        distance = s
        if C_TOEPLITZ & FORM:
            s += load_distances(TABLE, token[:, None], j, ASSEMBLY)
        if C_RANK_ONE & FORM:
            growth_j = (tl.load(TOKEN_TOTALS + j, mask=j < keys, other=0.0) - base).to(tl.float32)
            growth = growth_i[:, None] - growth_j
            distance = tl.abs(growth)
            s -= weight[:, None] * (distance if SYMMETRIC else growth)
        s = masked(s, j, first[:, None], end[:, None], counts[None, :], False, PADDED)
        new = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(new == C_NEGATIVE_INFINITY, 0.0, new)
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(m - safe)
        m = new
        length = tl.load(KEY_SIZES + j, mask=j < keys, other=0.0)
        size = tl.load(KEY_SIZES + keys + j, mask=j < keys, other=0.0)
        longest = tl.maximum(longest, tl.max(length))
        mass = mass * shrink + tl.sum(p, 1)
        of_value = of_value * shrink + tl.sum(p * size, 1)
        of_key = of_key * shrink + tl.sum(p * length, 1)
        of_both = of_both * shrink + tl.sum(p * tl.where(length * size < C_INFINITY, length * size, 0.0), 1)
        if GAINS:
            of_gained = of_gained * shrink + tl.sum(p * distance, 1)
            of_gained_value = of_gained_value * shrink + tl.sum(p * distance * size, 1)
    # What rounding may add to the logits; TF32 has 10 bits of each factor.
    rounding: tl.constexpr = 2.5e-3 if Q.dtype.element_ty == tl.float32 else 1e-6
    centred += norm * longest * rounding + (tl.abs(centred) + tl.abs(m)) * 1e-6
    norm = highest(tl.where(seen, norm, 0.0))
    lowest_high, lowest_low, highest_high, highest_low, light, heavy = norm, norm, norm, norm, norm, norm
    if C_RANK_ONE & FORM:
        lowest_high, lowest_low, highest_high, highest_low = range_of(total, seen)
        light = -highest(tl.where(seen, -weight, C_NEGATIVE_INFINITY))
        heavy = highest(tl.where(seen, weight, C_NEGATIVE_INFINITY))
    return (
        norm, excess(centred, m, mass, seen), excess(centred, m, of_value, seen), excess(centred, m, of_key, seen),
        excess(centred, m, of_both, seen), excess(centred, m, of_gained, seen),
        excess(centred, m, of_gained_value, seen), lowest_high, lowest_low, highest_high, highest_low, light, heavy,
    )  # fmt: skip


@triton.jit
def load_row_bounds(ROW_BOUNDS, m, units):
    """The fields of ROW_BOUNDS for units of a head's queries."""
    return (
        load_field(ROW_BOUNDS, 0, m, units), load_field(ROW_BOUNDS, 1, m, units), load_field(ROW_BOUNDS, 2, m, units),
        load_field(ROW_BOUNDS, 3, m, units), load_field(ROW_BOUNDS, 4, m, units), load_field(ROW_BOUNDS, 5, m, units),
        load_field(ROW_BOUNDS, 6, m, units), load_field(ROW_BOUNDS, 7, m, units), load_field(ROW_BOUNDS, 8, m, units),
        load_field(ROW_BOUNDS, 9, m, units), load_field(ROW_BOUNDS, 10, m, units), load_field(ROW_BOUNDS, 11, m, units),
        load_field(ROW_BOUNDS, 12, m, units),
    )  # fmt: skip
