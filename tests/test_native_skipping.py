"""What the native kernel leaves out cannot be seen in what it gives."""

import math
from collections.abc import Iterator

import pytest
import torch
from native_cases import FAMILIES, assert_close, compare, documents, normal
from torch import Tensor

from relpos.attend import kernel_ops, native
from relpos.encodings.call import Call
from relpos.encodings.forms import RankOne, Sum, Toeplitz

pytestmark = [
    pytest.mark.skipif(not native.available()[0], reason=native.available()[1]),
    pytest.mark.usefixtures("two_threads"),
]

HEADS, LENGTH, HEAD_DIM = 3, 1100, 32
SCALE = HEAD_DIM**-0.5
EPSILON = 2.0**-24

Case = tuple[str, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def qkv(size: float = 1.0) -> list[Tensor]:
    """Standard normal, q and k times `size`."""
    return [torch.randn(1, HEADS, LENGTH, HEAD_DIM) * factor for factor in (size, size, 1.0)]


def tables() -> Iterator[Case]:
    """Inputs made to be skipped wrongly, with a table: name, q, k, v, table, no total."""
    d = torch.arange(LENGTH).float()
    slopes = torch.tensor([0.6, 0.2, 0.05])[:, None]
    alibi = -slopes * d
    u = torch.nn.functional.normalize(torch.randn(HEAD_DIM), dim=0)
    yield "normal", *qkv(), alibi, None
    yield "large logits", *qkv(2.0), alibi, None
    q, k, v = qkv()
    q, k[:, :, 3], k[:, :, 500] = q + 4 * u, 400 * u, 100 * u
    yield "far keys of huge norm, aligned", q, k, v, alibi, None
    q, k, v = qkv()
    k[:, :, 3] *= 60
    yield "a far key of huge norm, in any direction", q, k, v, alibi, None
    q, k, v = qkv()
    q[:, :, 900] *= 60
    yield "a query of huge norm", q, k, v, alibi, None
    q, k, v = qkv()
    k[:, :, :500] += 24 * u
    k[:, :, 500:] -= 24 * u
    yield "near keys repelled, far attracted", q + 6 * u, k, v, alibi / 2, None
    yield "a growing table", *qkv(), 0.2 * slopes * d, None
    spikes = alibi.clone()
    spikes[:, 1000], spikes[:, 937] = 20, 3
    yield "a decaying table with far spikes", *qkv(), spikes, None
    buckets = (15 * torch.randn(HEADS, 32))[:, (torch.log2(d + 1) * 2.7).long().clamp(max=31)]
    yield "wild buckets", *qkv(), buckets, None
    yield "a cosine", *qkv(), 40 * torch.cos(d * torch.tensor([0.01, 0.05, 0.3])[:, None]), None
    window = alibi.clone()
    window[:, 100:] = -math.inf
    yield "a window", *qkv(), window, None
    hole = torch.zeros(HEADS, LENGTH)
    hole[:, 70:900] = -math.inf
    yield "a hole", *qkv(), hole, None
    yield "a slow logarithm", *qkv(), -torch.tensor([1.0, 2.5, 4.0])[:, None] * torch.log1p(d), None
    q, k, v = qkv()
    v[:, :, 3] *= 1e9
    v[:, :, 600] *= 1e4
    yield "huge far values", q, k, v, alibi, None
    q, k, v = qkv()
    yield "keys with a common offset", q, k + 50 * torch.randn(1, HEADS, 1, HEAD_DIM), v, alibi, None
    q, k, v = qkv()
    q[:, :, 500:600] = 0
    k[:, :, 64:128] = 0
    v[:, :, 64:200] = 0
    yield "zeros", q, k, v, alibi, None
    x = torch.randn(1, LENGTH, 3, HEADS, HEAD_DIM)
    yield "views of a packed tensor", *x.transpose(1, 3).unbind(2), alibi, None


def gates() -> Iterator[Case]:
    """The same with a running total: name, q, k, v, table or none, total."""
    steps = torch.rand(1, HEADS, LENGTH).double()
    yield "gates", *qkv(), None, (0.4 * steps).cumsum(-1)
    yield "gates that attract the past", *qkv(), None, -(0.2 * steps).cumsum(-1)
    yield "gates that wander", *qkv(), None, torch.randn(1, HEADS, LENGTH).double().cumsum(-1)
    dips = (0.4 * steps).cumsum(-1)
    dips[:, :, 5] += 400
    dips[:, :, 400] += 250
    yield "gates with far keys lifted", *qkv(), None, dips
    alibi = -torch.tensor([0.6, 0.2, 0.05])[:, None] * torch.arange(LENGTH)
    yield "a table against gates", *qkv(), alibi, -(0.3 * steps).cumsum(-1)
    yield "a flat table and gates", *qkv(), torch.zeros(HEADS, LENGTH), (0.4 * steps).cumsum(-1) + 1e7


def cases(causal: bool) -> Iterator[Case]:
    torch.manual_seed(9)
    for name, q, k, v, table, total in (*tables(), *gates()):
        both = None if table is None else torch.cat([0.7 * table[:, 1:].flip(1), table], 1)  # steeper into the past
        yield name, q, k, v, table if causal else both, total


def form(table: Tensor | None, total: Tensor | None, causal: bool) -> Sum:
    terms = []
    if table is not None:
        terms.append(Toeplitz(table, 0 if causal else LENGTH - 1))
    if total is not None:
        terms.append(RankOne(total, None, torch.float32, symmetric=not causal))
    return Sum(tuple(terms))


def dropped(skipping: Tensor) -> Tensor:
    """Which entries the kernel left out: (heads, length, length)."""
    blocks = (LENGTH + 63) // 64
    is_open = skipping[: 4 * HEADS].view(HEADS, 4)[:, 0] == 1
    kept = (skipping[4 * HEADS :].view(HEADS, blocks, 1) >> torch.arange(blocks) & 1).bool()
    kept |= ~is_open[:, None, None]
    return ~kept.repeat_interleave(64, 1).repeat_interleave(64, 2)[:, :LENGTH, :LENGTH]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_what_is_dropped_weighs_less_than_rounding(causal):
    """By row and by column, measured in float64 from the kernel's own record of what it left out."""
    i = torch.arange(LENGTH)
    shares = {}
    for name, q, k, v, table, total in cases(causal):
        zero = 0 if causal else LENGTH - 1
        arguments = (q, k, v, table, total, *[None] * 8, zero, causal, not causal, SCALE, True)
        lost = dropped(kernel_ops.forward(*arguments)[2])
        logits = SCALE * q.double() @ k.double().transpose(-1, -2)
        logits = logits + form(None if table is None else table.double(), total, causal).block(i, i).double()
        visible = i[:, None] >= i if causal else torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        weights = logits.masked_fill(~visible, -math.inf).softmax(-1)[0] * lost
        assert weights.sum(-1).max() < EPSILON, f"{name}: a row lost {weights.sum(-1).max():.1e}"
        assert weights.sum(-2).max() < EPSILON, f"{name}: a column lost {weights.sum(-2).max():.1e}"
        shares[name] = float((lost & visible).sum() / visible.sum() / HEADS)
    assert shares["normal"] > 0.5
    assert shares["gates"] > 0.5
    assert shares["a flat table and gates"] > 0.5
    assert shares["gates that attract the past"] < 0.1 or not causal
    assert shares["a growing table"] < 0.6


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_skipping_changes_nothing_beyond_rounding(causal):
    for name, q, k, v, table, total in cases(causal):
        grad = torch.randn(q.shape)
        results = []
        for skip in (True, False):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            numbers = [None if x is None else x.detach().clone().requires_grad_() for x in (table, total)]
            call = Call(LENGTH, LENGTH, causal, scale=SCALE)
            out = native.attention(*leaves, form(*numbers, causal), call, skip)
            out.backward(grad)
            results.append([out.detach(), *(x.grad for x in (*leaves, *numbers) if x is not None)])
        for skipped, whole in zip(*results, strict=True):
            # 2^−24 of what a row or a column could have received, and the rounding of sums of other terms.
            assert (skipped - whole).abs().max() <= 64 * EPSILON * whole.abs().max(), name


def test_a_decaying_bias_is_skipped_and_a_flat_one_is_not():
    q, k, v, _ = (x.float() for x in normal(1, 2, 2, 2048, 2048, 16))
    call = Call(2048, 2048, scale=0.25)
    native.attention(q, k, v, Toeplitz(-torch.arange(2048.0).repeat(2, 1), 0), call)
    assert native.skipped_fraction() > 0.85
    native.attention(q, k, v, Toeplitz(-torch.log1p(torch.arange(2048.0)).repeat(2, 1), 0), call)
    assert native.skipped_fraction() == 0.0
    native.attention(q, k, v, Toeplitz(-torch.arange(2048.0).repeat(2, 1), 0), call, skip=False)
    assert native.skipped_fraction() == 0.0


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("family", ["toeplitz", "rank one", "sum"])
def test_skipping_respects_documents_and_padding(family, causal):
    keys = 700
    padding = torch.rand(2, keys) > 0.2
    padding[0, 384:448] = False  # a whole tile
    packed = torch.stack([documents(500, 200), documents(10, 690)])
    options = {"documents": packed, "padding": padding, "causal": causal}
    call = Call(keys, keys, causal)
    steep = {
        "table": -2 * call.distances.abs().double().repeat(2, 1),
        "total": (4 * torch.rand(2, 2, keys).double()).cumsum(-1),
        "weight": torch.rand(2, 2, keys).double() + 0.5,
    }
    numbers = {n: steep[n] for n in FAMILIES[family].numbers(2, 2, call)}
    results = compare(normal(2, 2, 1, keys, keys, 16), FAMILIES[family], numbers, options)
    assert_close(results, logit=24.0)  # a row may see its nearest keys only far below 0
    assert native.skipped_fraction() > 0.3


@pytest.mark.parametrize("spoiled", [math.nan, math.inf, 1e25])
def test_a_far_key_that_is_no_number_is_never_skipped(spoiled):
    q, k, v, _ = (x.float() for x in normal(1, 1, 1, 640, 640, 16))
    k[0, 0, 5] = spoiled
    out = native.attention(q, k, v, Toeplitz(-torch.arange(640.0)[None], 0), Call(640, 640))
    whole = native.attention(q, k, v, Toeplitz(-torch.arange(640.0)[None], 0), Call(640, 640), skip=False)
    assert torch.equal(out.isnan(), whole.isnan())
    assert native.skipped_fraction() == 0.0
    torch.testing.assert_close(out, whole, equal_nan=True)
