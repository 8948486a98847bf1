"""RankOne: −weight_i · (total_i − total_j). Its gradients are sums of rows and of columns of the tiles."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from relpos.attend.triton.tiles import LOG2E
from relpos.forms.bias import running_sum

BIT = 2


@triton.jit
def load_totals(TOTALS, head, token, tokens, heads):
    """High and low part of the totals of tokens; `heads` counts those of the whole batch."""
    at = TOTALS + head * tokens + tl.minimum(token, tokens - 1)
    return tl.load(at), tl.load(at + wide_plane(tokens, heads))


@triton.jit
def load_weights(TOTALS, head, token, tokens, heads):
    """Weights of tokens, times log2(e)."""
    return tl.load(TOTALS + head * tokens + tl.minimum(token, tokens - 1) + 2 * wide_plane(tokens, heads))


@triton.jit
def wide_plane(tokens, heads):
    """Size of one of the three planes of TOTALS, int64."""
    return tokens * tl.full([], 1, tl.int64) * heads


@triton.jit
def gained(high_i, low_i, high_j, low_j):
    """total_i − total_j, exact to float32; all four broadcast to the tile."""
    return (high_i - high_j) + (low_i - low_j)


@triton.jit
def rank_one_bias(high_i, low_i, weight_i, high_j, low_j, SYMMETRIC: tl.constexpr):
    """The bias of a tile in log2."""
    growth = gained(high_i, low_i, high_j, low_j)
    if SYMMETRIC:
        growth = tl.abs(growth)
    return -weight_i * growth


@triton.jit
def signed(ds, growth, SYMMETRIC: tl.constexpr):
    """The gradient of a tile's logits with the sign of the growth, where its absolute value counts."""
    if SYMMETRIC:
        ds = tl.where(growth > 0, ds, tl.where(growth < 0, -ds, 0.0))
    return ds


def pack(inputs, arguments):
    """Totals as sums of two floats, and weights: (3, batch · heads, tokens)."""
    tokens = inputs.total if inputs.step is None else inputs.step
    total = (inputs.total if inputs.step is None else running_sum(inputs.step.double())).detach()
    largest = torch.finfo(torch.float32).max
    total = (total - total.amin(-1, keepdim=True)).clamp(-largest, largest)
    high = total.float()
    low = (total - high.double()).float()
    weight = torch.ones_like(high) if inputs.weight is None else inputs.weight.detach().float()
    arguments.update(
        TOTALS=torch.stack([high, low, weight * LOG2E]).flatten(1, 2),
        tokens=tokens.shape[-1],
        SYMMETRIC=inputs.symmetric,
    )


def gradients(inputs, row_sums: Tensor, row_growth: Tensor, key_sums: Tensor) -> dict[str, Tensor]:
    """Gradients from Σ_j ds and Σ_j ds · growth of each query, and Σ_i ds · weight of each key, (batch, heads, …)."""
    tokens = (inputs.total if inputs.step is None else inputs.step).shape[-1]
    queries, keys, start = row_sums.shape[-1], key_sums.shape[-1], inputs.start
    around = (start, tokens - queries - start)
    rows = F.pad(row_sums.double(), around)  # (batch, heads, tokens)
    if inputs.weight is not None:
        rows = rows * inputs.weight.double()
    grad_total = F.pad(key_sums.double(), (0, tokens - keys)) - rows  # total_j gains, total_i loses
    grads = {}
    if inputs.step is None:
        grads["total"] = grad_total.to(inputs.total.dtype)
    else:  # total_t is the sum of all steps up to t
        grads["step"] = running_sum(grad_total.flip(-1)).flip(-1).to(inputs.step.dtype)
    if inputs.weight is not None:
        grads["weight"] = -F.pad(row_growth, around).to(inputs.weight.dtype)
    return grads
