"""What every kernel does with a tile of BM queries and BN keys: load, multiply, cap, mask, drop, store.

Rules that hold in all kernels: logits are in units of log2, so that exp2 is the only exponential; a base address is
64-bit, an offset inside a tile 32-bit; nothing is added to memory by atomics.
"""

import math
import os

import triton
import triton.language as tl

LOG2E = math.log2(math.e)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Globals that a kernel reads must be constexpr.
C_LOG2E = tl.constexpr(LOG2E)
C_INFINITY = tl.constexpr(float("inf"))
C_NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
C_LARGEST_INDEX = tl.constexpr(2**31 - 1)
C_INTERPRETED = tl.constexpr(INTERPRETED)
# Numbers that change from call to call. Triton would compile a kernel again for a 1 and for multiples of 16.
CHANGING = (
    "blocks", "heads", "group", "batch", "queries", "keys", "start", "interval_b", "range_b", "zero", "table_h",
    "curve_zero",
    "query_width", "key_width", "tokens", "inverse_b", "inverse_start", "relative_zero", "query_relative_h",
    "key_relative_h", "far_low", "far_high", "lowest", "splits", "seed_high", "seed_low", "threshold", "scale",
    "softcap", "kept_factor", "key_units", "row_units", "allowed",
)  # fmt: skip


@triton.jit
def wide(x):
    """x as int64. `x.to` would fail: a loop variable is a Python int in the interpreter, an argument 1 a constexpr."""
    return x * tl.full([], 1, tl.int64)


@triton.jit
def block_and_head(blocks):
    """The block of a program and its head. Both are on the first axis of the grid: the others end at 65,535."""
    number = tl.program_id(0)
    return number % blocks, (number // blocks).to(tl.int64)


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a·b in float32. Triton's interpreter multiplies the bits of bfloat16 numbers, so it gets float32."""
    if C_INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def load_tile(X, row, stride, limit, ROWS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """ROWS rows of X from `row` on, 0 from `limit` on; WIDTH columns of which SIZE exist: (ROWS, WIDTH)."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = X + wide(row) * stride + rows[:, None] * stride + columns[None, :]
    inside = (row + rows)[:, None] < limit
    if SIZE != WIDTH:
        inside = inside & (columns[None, :] < SIZE)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def load_keys(X, PADDING, row, stride, limit, ROWS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
              PADDED: tl.constexpr):  # fmt: skip
    """The same for keys or values: 0 also in padding, whatever it holds. Returns the tile, and what counts of it."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = X + wide(row) * stride + rows[:, None] * stride + columns[None, :]
    counts = (row + rows) < limit
    if PADDED:
        counts = counts & (tl.load(PADDING + row + rows, mask=counts, other=0) != 0)
    inside = counts[:, None]
    if SIZE != WIDTH:
        inside = inside & (columns[None, :] < SIZE)
    return tl.load(at, mask=inside, other=0.0), counts


@triton.jit
def store_tile(X, row, stride, limit, tile, ROWS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Store the rows below `limit` of a tile, in the dtype of X."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = X + wide(row) * stride + rows[:, None] * stride + columns[None, :]
    tl.store(at, tile.to(X.dtype.element_ty), mask=((row + rows)[:, None] < limit) & (columns[None, :] < SIZE))


@triton.jit
def load_entries(at, ASSEMBLY: tl.constexpr):
    """Entries of a table, one per score.

    A tl.load would be taken into Triton's software pipeline, as it feeds a product: one copy of 4 bytes per entry, a
    tile of shared memory per stage and some 70 registers more. ASSEMBLY, which NVIDIA's GPUs have, stays out of it.
    """
    if ASSEMBLY:
        return tl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [at], tl.float32, is_pure=True, pack=1)
    else:  # noqa: RET505  (Triton compiles one of the two branches)
        return tl.load(at)


@triton.jit
def capped(products, scale, softcap, CAPPED: tl.constexpr):
    """Scores in log2, and their derivative by scale · products (1 without a softcap)."""
    if CAPPED:  # tanh x = 1 − 2 / (1 + e^2x), with an absolute error of 1e-7; tanh.approx is too coarse
        t = 1.0 - 2.0 / (1.0 + tl.exp2(products * (scale / softcap * 2.0 * C_LOG2E)))
        return t * (softcap * C_LOG2E), 1.0 - t * t
    else:  # noqa: RET505
        return products * (scale * C_LOG2E), 1.0


@triton.jit
def row_interval(FIRST, END, b, r, queries, interval_b):
    """First key and one past the last key of rows. Rows beyond the queries repeat the last, and need no other case."""
    at = b * interval_b + tl.minimum(r, queries - 1)
    return tl.load(FIRST + at), tl.load(END + at)


@triton.jit
def key_range(first, end, BN: tl.constexpr):
    """The keys that a block of queries sees, [begin, stop), and those that all its queries see, [inner, outer)."""
    seen = first < end
    stop = tl.max(tl.where(seen, end, 0))
    begin = tl.minimum(tl.min(tl.where(seen, first, C_LARGEST_INDEX)), stop) // BN * BN
    return begin, stop, tl.max(first), tl.min(end)


@triton.jit
def full_tiles(begin, stop, inner, outer, SIZE: tl.constexpr):
    """Of the tiles that cover [begin, stop), those that lie in [inner, outer): where they begin, and end."""
    low = tl.maximum(tl.cdiv(inner, SIZE) * SIZE, begin)
    return low, tl.maximum(tl.minimum(outer // SIZE, tl.cdiv(stop, SIZE)) * SIZE, low)


@triton.jit
def loop_range(begin, stop, low, high, FULL: tl.constexpr):
    """The range of a loop over the full tiles of [begin, stop), [low, high), or over those around them.

    Two loops, as the mask is then no part of the one over full tiles: compilers turn a branch around it into
    selections, which all tiles pay for.
    """
    if FULL:
        begin, stop = low, high
    else:
        stop -= high - low
    return begin, stop


@triton.jit
def tile_start(at, low, high, FULL: tl.constexpr):
    """The first token of the tile at this place of `loop_range`."""
    if not FULL:
        at += tl.where(at < low, 0, high - low)
    return at


@triton.jit
def masked(s, j, first, end, counts, FULL: tl.constexpr, PADDED: tl.constexpr):
    """−inf where a key is not seen; j, first, end and counts broadcast to the tile."""
    if not FULL:
        s = tl.where((j >= first) & (j < end), s, C_NEGATIVE_INFINITY)
    if PADDED:
        s = tl.where(counts, s, C_NEGATIVE_INFINITY)
    return s


@triton.jit
def mix(x):
    """A permutation of uint32 in which every output bit depends on every input bit (reference.mix)."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def head_hash(seed_high, seed_low, head):
    """The hash of a head; the seed's own hash comes as two halves of 16 bits."""
    nothing = tl.full([], 0, tl.uint32)
    return mix((nothing + seed_high) * 65536 + (nothing + seed_low) + head.to(tl.uint32))


@triton.jit
def dropped(weights, hashed, i, j, threshold, kept_factor, DROPS: tl.constexpr):
    """Weights times 0 or 1 / (1 − dropout), by the same generator as the definition (reference.kept)."""
    if DROPS:
        bits = mix(mix(hashed + i.to(tl.uint32)) + mix(j.to(tl.uint32) + 0x9E3779B9)) >> 8
        weights = tl.where(bits.to(tl.int32) >= threshold, weights * kept_factor, 0.0)
    return weights
