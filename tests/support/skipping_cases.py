"""Inputs chosen to be skipped wrongly, and what skipping promises about them (docs/attention.md), in float64."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from relpos.attend import reference
from relpos.attend.kernel_inputs import Inputs
from relpos.forms.bias import RankOne, Sum, Toeplitz
from relpos.forms.call import Call

HEADS, LENGTH, HEAD_DIM = 3, 850, 32
SCALE = HEAD_DIM**-0.5
EPSILON = 2.0**-24

Case = tuple[str, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def qkv(size: float = 1.0) -> list[Tensor]:
    """Standard normal, q and k times `size`."""
    return [torch.randn(1, HEADS, LENGTH, HEAD_DIM) * factor for factor in (size, size, 1.0)]


def tables() -> Iterator[Case]:
    """Inputs chosen to be skipped wrongly, with a table: name, q, k, v, table, no total and no weight."""
    d = torch.arange(LENGTH).float()
    slopes = torch.tensor([0.6, 0.2, 0.05])[:, None]
    alibi = -slopes * d
    u = torch.nn.functional.normalize(torch.randn(HEAD_DIM), dim=0)
    yield "normal", *qkv(), alibi, None, None
    yield "large logits", *qkv(2.0), alibi, None, None
    q, k, v = qkv()
    q, k[:, :, 3], k[:, :, 400] = q + 4 * u, 400 * u, 100 * u
    yield "far keys of huge norm, aligned", q, k, v, alibi, None, None
    q, k, v = qkv()
    k[:, :, 3] *= 60
    yield "a far key of huge norm, in any direction", q, k, v, alibi, None, None
    q, k, v = qkv()
    q[:, :, 800] *= 60
    yield "a query of huge norm", q, k, v, alibi, None, None
    q, k, v = qkv()
    k[:, :, :500] += 24 * u
    k[:, :, 500:] -= 24 * u
    yield "near keys repelled, far attracted", q + 6 * u, k, v, alibi / 2, None, None
    yield "a growing table", *qkv(), 0.2 * slopes * d, None, None
    spikes = alibi.clone()
    spikes[:, 800], spikes[:, 737] = 20, 3
    yield "a decaying table with far spikes", *qkv(), spikes, None, None
    buckets = (15 * torch.randn(HEADS, 32))[:, (torch.log2(d + 1) * 2.7).long().clamp(max=31)]
    yield "wild buckets", *qkv(), buckets, None, None
    yield "a cosine", *qkv(), 40 * torch.cos(d * torch.tensor([0.01, 0.05, 0.3])[:, None]), None, None
    window = alibi.clone()
    window[:, 100:] = -math.inf
    yield "a window", *qkv(), window, None, None
    hole = torch.zeros(HEADS, LENGTH)
    hole[:, 70:700] = -math.inf
    yield "a hole", *qkv(), hole, None, None
    yield "a slow logarithm", *qkv(), -torch.tensor([1.0, 2.5, 4.0])[:, None] * torch.log1p(d), None, None
    q, k, v = qkv()
    v[:, :, 3] *= 1e9
    v[:, :, 600] *= 1e4
    yield "huge far values", q, k, v, alibi, None, None
    q, k, v = qkv()
    yield "keys with a common offset", q, k + 50 * torch.randn(1, HEADS, 1, HEAD_DIM), v, alibi, None, None
    q, k, v = qkv()
    q[:, :, 500:600] = 0
    k[:, :, 64:128] = 0
    v[:, :, 64:200] = 0
    yield "zeros", q, k, v, alibi, None, None
    x = torch.randn(1, LENGTH, 3, HEADS, HEAD_DIM)
    yield "views of a packed tensor", *x.transpose(1, 3).unbind(2), alibi, None, None


def gates() -> Iterator[Case]:
    """The same with a running total: name, q, k, v, table or none, total, weight or none."""
    steps = torch.rand(1, HEADS, LENGTH).double()
    yield "gates", *qkv(), None, (0.4 * steps).cumsum(-1), None
    yield "gates that attract the past", *qkv(), None, -(0.2 * steps).cumsum(-1), None
    yield "gates that wander", *qkv(), None, torch.randn(1, HEADS, LENGTH).double().cumsum(-1), None
    weight = torch.rand(1, HEADS, LENGTH)
    yield "weighted gates", *qkv(), None, (0.4 * steps).cumsum(-1), weight + 0.5
    yield "weighted gates, some of them negative", *qkv(), None, (0.4 * steps).cumsum(-1), weight - 0.2
    rare = (steps > 0.98).double()
    yield "steps far apart, and long", *qkv(), None, (1e9 * rare).cumsum(-1), (weight + 1) * 2e-8
    dips = (0.4 * steps).cumsum(-1)
    dips[:, :, 5] += 400
    dips[:, :, 400] += 250
    yield "gates with far keys lifted", *qkv(), None, dips, None
    alibi = -torch.tensor([0.6, 0.2, 0.05])[:, None] * torch.arange(LENGTH)
    yield "a table against gates", *qkv(), alibi, -(0.3 * steps).cumsum(-1), None
    yield "a flat table and gates", *qkv(), torch.zeros(HEADS, LENGTH), (0.4 * steps).cumsum(-1) + 1e7, None


def cases(causal: bool) -> Iterator[Case]:
    torch.manual_seed(9)
    for name, q, k, v, table, total, weight in (*tables(), *gates()):
        both = None if table is None else torch.cat([0.7 * table[:, 1:].flip(1), table], 1)  # steeper into the past
        yield name, q, k, v, table if causal else both, total, weight


def form(table: Tensor | None, total: Tensor | None, weight: Tensor | None, causal: bool, length: int = LENGTH) -> Sum:
    terms = []
    if table is not None:
        terms.append(Toeplitz(table, 0 if causal else length - 1))
    if total is not None:
        dtype = torch.float32 if weight is None else weight.dtype
        terms.append(RankOne(total, weight, dtype, symmetric=not causal))
    return Sum(tuple(terms))


def inputs_of(case: Case, causal: bool) -> Inputs:
    """The inputs of a kernel for a case."""
    _, q, k, v, table, total, weight = case
    zero = 0 if causal else LENGTH - 1
    return Inputs(q, k, v, table, total, weight=weight, zero=zero, scale=SCALE, causal=causal, symmetric=not causal)


def weights_of(q: Tensor, k: Tensor, bias: Sum, causal: bool) -> Tensor:
    """The weights in float64: (batch, heads, queries, keys)."""
    i = torch.arange(q.shape[2])
    logits = SCALE * q.double() @ k.double().transpose(-1, -2) + bias.block(i, i).double()
    return logits.masked_fill((i[:, None] < i) & causal, -math.inf).softmax(-1)


def share_lost(case: Case, causal: bool, lost: Tensor) -> float:
    """Check that no sum over the keys of a row loses too much, and return the share of the entries that are lost.

    `lost` (heads, length, length) are the entries that a kernel left out.
    """
    name, q, k, v, table, total, weight = case
    weights = weights_of(
        q, k, form(*(None if x is None else x.double() for x in (table, total, weight)), causal), causal
    )
    weights = weights[0]
    value, key = v[0].double().abs().amax(-1)[:, None], k[0].double().norm(dim=-1)[:, None]
    factors = {"softmax": torch.ones(1, 1, 1), "output": value, "keys": key, "gradient of q": key * value}
    if weight is not None:
        assert total is not None
        gained = (total[0, :, :, None] - total[0, :, None, :]).abs()
        factors |= {"gained": gained, "gradient of the weight": gained * value}
    for what, factor in factors.items():
        # Below 2^−126 a weight is 0 in float32 with or without skipping.
        counted = weights.where(weights > 2.0**-126, 0) * factor
        excess = (counted * lost).sum(-1) - EPSILON * counted.sum(-1)
        assert excess.max() <= 0, f"{name}: in the {what}, a row lost too much"
    columns = (weights * lost).sum(-2)
    assert columns.max() < EPSILON, f"{name}: a column lost {columns.max():.1e}"
    i = torch.arange(LENGTH)
    visible = (i[:, None] >= i) | (not causal)
    return float((lost & visible).sum() / visible.sum() / HEADS)


# -- Cases in which what is multiplied by a tiny weight is huge: nothing may be lost, entry by entry


def far(length: int, near: float, beyond: float, blocks: int) -> Tensor:
    """Rows of `beyond` in the first so many blocks of 64, of `near` behind: (1, 1, length, 8)."""
    x = torch.full((1, 1, length, 8), near)
    x[:, :, : 64 * blocks] = beyond
    return x


def nothing(length: int) -> Tensor:
    return torch.zeros(1, 1, length, 8)


def step_table(length: int, depth: float) -> Tensor:
    """0 below distance 64, −depth beyond."""
    table = torch.full((1, length), -depth)
    table[:, :64] = 0
    return table


def one_step(length: int, size: float, depth: float) -> tuple[Tensor, Tensor]:
    """A running total with one step at token 64, and weights with which it is worth `depth`."""
    total = torch.zeros(1, 1, length, dtype=torch.float64)
    total[..., 64:] = size
    return total, torch.full((1, 1, length), depth / size)


def huge_factors() -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]]:
    """q, k, v, gradient of the output, and the numbers of the bias."""
    zero, one = nothing(576), torch.ones(1, 1, 576, 8)
    wide = torch.randn(1, 1, 576, 8, generator=torch.Generator().manual_seed(1))
    table = step_table(576, 25.0)  # 36 bits: the bias alone would let tiles be skipped, on GPUs too
    late = far(576, 1e8, 1.0, 4)  # in the last 5 of 9 blocks
    short = (nothing(128), nothing(128), far(128, 0.0, 1.0, 1), torch.ones(1, 1, 128, 8))
    return {
        "huge values in most blocks": (zero, zero, far(576, 1.0, 1e8, 5), one, table, None, None),
        "huge values behind values of 0": (zero, zero, far(576, 0.0, 1.0, 5), one, table, None, None),
        "huge keys that no query points to": (zero, far(576, 1.0, 1e8, 5), wide, one, table, None, None),
        "huge keys and values": (zero, far(576, 1.0, 1e4, 5), wide * far(576, 1.0, 1e4, 5), one, table, None, None),
        "huge gradients of far queries": (zero, zero, wide, wide * late, table, None, None),
        "gradients of far queries alone": (zero, zero, wide, wide * far(576, 1.0, 0.0, 8), table, None, None),
        "huge far queries": (late * 1e-8, zero + 1e-9, wide, wide, table, None, None),
        "a long step and far values": (*short, None, *one_step(128, 1e9, 23.5)),
        "a longer step": (*short, None, *one_step(128, 1e12, 40.0)),
        "a step and a table": (zero, zero, far(576, 1e-6, 1.0, 1), one, step_table(576, 10.0), *one_step(576, 1e9, 20)),
        "huge values of tiny keys": (zero, far(576, 1.0, 1e-8, 5), far(576, 1.0, 1e8, 5), one, table, None, None),
    }


def check_huge_factors(name: str, causal: bool, kernel: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
    """A kernel, called with `skip` last, gives what the definition gives, as exactly as without skipping."""
    *tensors, grad, table, total, weight = huge_factors()[name]
    length = grad.shape[2]
    if not causal and table is not None:
        table = torch.cat([table[:, 1:].flip(1), table], 1)
    results = []
    for dtype, skip in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
        numbers = [None if x is None else x.detach().to(dtype).requires_grad_() for x in (table, total, weight)]
        bias = form(numbers[0], None if numbers[1] is None else numbers[1].double(), numbers[2], causal, length)
        call = Call(length, length, causal=causal, scale=SCALE, dtype=dtype)
        if dtype == torch.float64:
            out, _ = reference.attention(*leaves, bias, call)
        else:
            out, _ = kernel(*leaves, bias, call, skip)
        out.backward(grad.to(dtype))
        results.append([out.detach().double(), *(x.grad.double() for x in (*leaves, *numbers) if x is not None)])
    numbers = [None if x is None else x.double() for x in (table, total, weight)]
    bounds = promised(*tensors, grad, form(*numbers, causal, length), causal, table is not None)
    for number, (expected, complete, skipped) in enumerate(zip(*results, strict=True)):
        # As right as without skipping, entry by entry; in sums that cancel, below 2^−24 of what cancels.
        allowed = 8 * EPSILON * expected.abs() + 2 * (complete - expected).abs() + bounds.get(number, 0.0)
        assert ((skipped - expected).abs() <= allowed).all(), f"{name}: number {number} of the results"


def promised(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, bias: Sum, causal: bool, has_table: bool
) -> dict[int, Tensor]:
    """What skipping may change in the gradients of q and k and in that of a table, by docs/attention.md."""
    weights = weights_of(q, k, bias, causal)
    size = grad.double().abs().sum(-1, keepdim=True)  # |g_i|
    key, value = k.double().norm(dim=-1)[:, :, None], v.double().abs().amax(-1)[:, :, None]
    output = (weights * value).sum(-1, keepdim=True)  # V_i
    rows = SCALE * size * (weights * key * (value + output)).sum(-1, keepdim=True)
    # The tiles on the diagonal and below it are always computed here: what their queries weigh, keys may lose 2^−24 of.
    weighs = size * q.double().norm(dim=-1, keepdim=True) * output.max()
    met = torch.nn.functional.max_pool1d(
        torch.cat([weighs, weighs[:, :, -64:] * 0], 2)[0, :, :, 0], 128, 64
    ).repeat_interleave(64, 1)
    bounds = {1: rows, 2: SCALE * met[None, :, :, None]} | ({4: (size * output).max()} if has_table else {})
    return {number: 4 * EPSILON * bound for number, bound in bounds.items()}
