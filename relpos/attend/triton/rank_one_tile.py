"""RankOne: −weight_i · (total_i − total_j), one operation per score. Its gradients are sums of rows and of columns.

A total is the total of the first token of its block, kept to 48 bits, plus its growth since then. −weight_i · growth_i
is one number per row: it joins the row's log-sum-exp. What lies between the first query and the first key of a tile is
added to its queries in the kernels that stay at queries, to its keys in the one that stays at keys: never per score.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from relpos.attend.triton import FEW
from relpos.attend.triton.tiles import LOG2E, wide
from relpos.forms.bias import running_sum

BIT = 2


@triton.jit
def between(QUERY_BASES, KEY_BASES, head, row_block, key_block, row_blocks, key_blocks):
    """The total of a block's first query minus that of a block's first key, each kept as a sum of two floats."""
    q = QUERY_BASES + (head * row_blocks + row_block) * 2
    k = KEY_BASES + (head * key_blocks + key_block) * 2
    return (tl.load(q) - tl.load(k)) + (tl.load(q + 1) - tl.load(k + 1))


@triton.jit
def rank_one_bias(weight_i, growth_i, growth_j, WEIGHTED: tl.constexpr, SYMMETRIC: tl.constexpr):
    """The bias of a tile in log2, but for −weight_i · growth_i of each row, unless symmetric."""
    if SYMMETRIC:
        bias = -weight_i * tl.abs(growth_i - growth_j)
    elif WEIGHTED:
        bias = weight_i * growth_j
    else:
        bias = growth_j
    return bias


@triton.jit
def load_totals(TOTALS, head, token, tokens, heads):
    """High part, low part and weight of tokens, of which each row has its own head; `heads` counts the batch's."""
    plane = wide(tokens) * heads
    at = TOTALS + head * tokens + tl.minimum(token, tokens - 1)
    return tl.load(at), tl.load(at + plane), tl.load(at + 2 * plane)


@triton.jit
def bias_of_totals(high_i, low_i, weight_i, high_j, low_j, SYMMETRIC: tl.constexpr):
    """The bias of a tile in log2, of which each row has a head of its own."""
    growth = (high_i - high_j) + (low_i - low_j)
    if SYMMETRIC:
        growth = tl.abs(growth)
    return -weight_i * growth


@triton.jit
def signed(ds, RANKS, i, j, tokens, SYMMETRIC: tl.constexpr):
    """The gradient of a tile's logits with the sign of total_i − total_j, where its absolute value counts.

    It comes from the ranks of the totals: rounded growth differs from kernel to kernel, as their blocks do, also
    between two tokens of the same total, whose sign is 0.
    """
    if SYMMETRIC:
        rank_i, rank_j = tl.load(RANKS + tl.minimum(i, tokens - 1)), tl.load(RANKS + tl.minimum(j, tokens - 1))
        ds = tl.where(rank_i > rank_j, ds, tl.where(rank_i < rank_j, -ds, 0.0))
    return ds


def ranks(total: Tensor) -> Tensor:
    """The rank of each token's total among those of its head, equal for equal totals: (heads, tokens), int32."""
    return torch.searchsorted(total.sort(-1).values, total.contiguous()).int()


def pack(inputs, arguments):
    """Totals since the first token, float64, and weights times log2(e): (batch · heads, tokens)."""
    total = inputs.total if inputs.step is None else running_sum(inputs.step.double())
    total = total.detach().flatten(0, 1)
    weight = None if inputs.weight is None else inputs.weight.detach().float().flatten(0, 1) * LOG2E
    weighted, largest = weight is not None or inputs.symmetric, torch.finfo(torch.float32).max
    arguments.update(
        totals=(total - total[:, :1]).clamp(-largest, largest) * (1.0 if weighted else LOG2E),
        token_weights=weight,
        WEIGHTED=weighted,
        tokens=total.shape[1],
        SYMMETRIC=inputs.symmetric,
    )
    if inputs.q.shape[2] <= FEW:
        arguments.update(TOTALS=pack_totals(total.view(*inputs.q.shape[:2], -1), inputs.weight))


def pack_totals(total: Tensor, weight: Tensor | None) -> Tensor:
    """Totals (batch, heads, tokens) as sums of two floats, and weights times log2(e): (3, batch · heads, tokens)."""
    largest = torch.finfo(torch.float32).max
    total = (total - total.amin(-1, keepdim=True)).clamp(-largest, largest)
    high = total.float()
    low = (total - high.double()).float()
    weight = torch.ones_like(high) if weight is None else weight.detach().float()
    return torch.stack([high, low, weight * LOG2E]).flatten(1, 2)


def by_blocks(arguments, BM: int, BN: int) -> dict[str, Tensor]:
    """What a kernel with tiles of BM queries and BN keys reads: growth and bases of both, weights of the queries."""
    total, start = arguments["totals"], arguments["start"]
    rows = total[:, start : start + arguments["queries"]]
    query_growth, query_bases = blocks_of(rows, BM)
    key_growth, key_bases = blocks_of(total[:, : arguments["keys"]], BN)
    values = {"QUERY_GROWTH": query_growth, "QUERY_BASES": query_bases}
    values |= {"KEY_GROWTH": key_growth, "KEY_BASES": key_bases}
    if arguments["WEIGHTED"]:
        weight = arguments["token_weights"]
        weight = torch.full_like(rows, LOG2E) if weight is None else weight[:, start : start + rows.shape[1]]
        values["WEIGHTS"] = F.pad(weight.float(), (0, query_growth.shape[1] - rows.shape[1])).contiguous()
    return values


def blocks_of(total: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Growth since the first token of each block, (heads, tokens, padded); that token's total, (heads, blocks, 2)."""
    blocks = F.pad(total[:, None], (0, -total.shape[1] % size), mode="replicate")[:, 0]
    blocks = blocks.reshape(len(total), -1, size)  # (heads, blocks, size)
    first = blocks[..., 0]
    high = first.float()
    bases = torch.stack([high, (first - high.double()).float()], -1)
    return (blocks - first[..., None]).float().flatten(1), bases.contiguous()


def levels(lse: Tensor, values: dict[str, Tensor], symmetric: bool) -> Tensor:
    """The log-sum-exp of the queries, (batch, heads, queries), plus what `rank_one_bias` leaves out of their logits."""
    if symmetric:
        return lse
    shift = values["QUERY_GROWTH"]
    if "WEIGHTS" in values:
        shift = shift * values["WEIGHTS"]
    return lse + shift[:, : lse.shape[-1]].view_as(lse)


def gradients(inputs, row_sums: Tensor, row_growth: Tensor | None, key_sums: Tensor) -> dict[str, Tensor]:
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
        assert row_growth is not None
        grads["weight"] = -F.pad(row_growth, around).to(inputs.weight.dtype)
    return grads
