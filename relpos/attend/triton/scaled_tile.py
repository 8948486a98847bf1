"""Scaled (FIRE): f_h(x) with x = table[i − j] · inverse_i and f_h piecewise linear.

f_h(x) = base + gain · x + Σ_s bend_s · max(x − knot_s, 0). In one tile x changes little: base and gain include the
knots below its range, and only the knots inside are evaluated, few in a tile of far keys.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from relpos.attend.piecewise import after_knots, hinge_gradients
from relpos.attend.triton.tiles import C_LOG2E, LOG2E
from relpos.attend.triton.toeplitz_tile import PAD

BIT = 4


@triton.jit
def knots_inside(x, HINGES, KNOTS: tl.constexpr):
    """The first knot inside the range of x, and one past the last. HINGES is the head's; knots are padded by inf."""
    knot = tl.load(HINGES + tl.arange(0, KNOTS))
    low = tl.sum((knot < tl.min(x)).to(tl.int32), 0)
    return low, tl.maximum(tl.sum((knot < tl.max(x)).to(tl.int32), 0), low)


@triton.jit
def scaled_bias(x, KNOT, HINGES, KNOTS: tl.constexpr):
    """The bias of a tile in log2. All heads have the same knots, KNOT; HINGES may be a column, one head per row."""
    low, high = knots_inside(x, KNOT, KNOTS)
    bias = x * tl.load(HINGES + 2 * KNOTS + low) + tl.load(HINGES + KNOTS + low)
    for s in range(low, high):
        bias += tl.load(HINGES + 3 * KNOTS + s) * tl.maximum(x - tl.load(KNOT + s), 0.0)
    return bias


@triton.jit
def scaled_slope(x, HINGES, KNOTS: tl.constexpr):
    """The derivative of f at each x of a tile."""
    low, high = knots_inside(x, HINGES, KNOTS)
    slope = tl.load(HINGES + 2 * KNOTS + low) + x * 0.0
    for s in range(low, high):
        slope += tl.where(x > tl.load(HINGES + s), tl.load(HINGES + 3 * KNOTS + s), 0.0)
    return slope * (1.0 / C_LOG2E)


@triton.jit
def fold_knots(sums, ds, x, HINGES, KNOTS: tl.constexpr):
    """Add a tile to the sums (4, KNOTS) that `hinge_gradients` reads."""
    low, high = knots_inside(x, HINGES, KNOTS)
    kind, at = tl.arange(0, 4)[:, None], tl.arange(0, KNOTS)[None, :]
    plain, times_x = tl.sum(tl.sum(ds, 1), 0), tl.sum(tl.sum(ds * x, 1), 0)
    sums += tl.where((at == low) & (kind == 0), plain, 0.0) + tl.where((at == low) & (kind == 1), times_x, 0.0)
    for s in range(low, high):
        over = x - tl.load(HINGES + s)
        above = tl.sum(tl.sum(tl.where(over > 0, ds * over, 0.0), 1), 0)
        passed = tl.sum(tl.sum(tl.where(over > 0, ds, 0.0), 1), 0)
        sums += tl.where((at == s) & (kind == 2), above, 0.0) + tl.where((at == s) & (kind == 3), passed, 0.0)
    return sums


def pack(inputs, arguments):
    """The table over distances, padded; the factor of each query; and knots, bases, gains, bends: (heads, 4, KNOTS)."""
    knot, bend = inputs.knot.detach(), inputs.bend.detach()
    base, gain = after_knots(knot, inputs.base.detach(), inputs.gain.detach(), bend)
    width = triton.next_power_of_2(len(knot) + 1)
    rows = [knot.expand_as(bend), *(x * LOG2E for x in (base, gain, bend))]
    fills = (torch.inf, 0.0, 0.0, 0.0)
    hinges = [F.pad(x.float(), (0, width - x.shape[1]), value=fill) for x, fill in zip(rows, fills, strict=True)]
    inverse = inputs.inverse.detach().float().contiguous()
    arguments.update(
        CURVE=F.pad(inputs.curve.detach().float(), (PAD, PAD)).contiguous(),
        curve_zero=inputs.zero + PAD,
        INVERSE=inverse,
        inverse_b=inverse.shape[1] if inverse.shape[0] > 1 else 0,
        HINGES=torch.stack(hinges, 1).contiguous(),
        KNOTS=width,
    )


def gradients(inputs, distances: Tensor, rows: Tensor, sums: Tensor, constant_matters: bool) -> dict[str, Tensor]:
    """Gradients from the sums per distance (heads, distances), per query (batch, heads, queries) and per knot.

    The sums per knot are (batch, heads, blocks of queries, 4, KNOTS).
    """
    by_batch = rows.double().sum(1)  # (batch, queries)
    by_head = sums.double().sum((0, 2))[..., : len(inputs.knot) + 1]  # (heads, 4, knots + 1)
    return {
        "curve": distances.sum(0).to(inputs.curve.dtype),
        "inverse": by_batch if len(inputs.inverse) > 1 else by_batch.sum(0, keepdim=True),
    } | hinge_gradients(by_head, inputs.knot, inputs.bend, constant_matters)
