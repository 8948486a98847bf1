"""What the native kernel leaves out cannot be seen in what it gives."""

import math

import pytest
import torch
from kernel_cases import FAMILIES, assert_close, compare, documents, normal
from skipping_cases import (
    EPSILON,
    HEADS,
    LENGTH,
    SCALE,
    cases,
    check_huge_factors,
    form,
    huge_factors,
    inputs_of,
    share_lost,
)
from torch import Tensor

from relpos.attend import native
from relpos.attend.native import operators
from relpos.forms.bias import Toeplitz
from relpos.forms.call import Call

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not native.available()[0], reason=native.available()[1]),
    pytest.mark.usefixtures("two_threads"),
]

DIRECTIONS = [True, pytest.param(False, marks=pytest.mark.slow)]


def dropped(skipping: Tensor) -> Tensor:
    """Which entries the kernel left out: (heads, length, length)."""
    blocks = (LENGTH + 63) // 64
    slack = skipping[4 * HEADS :].view(torch.uint8)[: HEADS * blocks**2].view(HEADS, blocks, blocks)
    return (slack > 0).repeat_interleave(64, 1).repeat_interleave(64, 2)[:, :LENGTH, :LENGTH]


@pytest.mark.parametrize("causal", DIRECTIONS, ids=["causal", "bidirectional"])
def test_what_a_row_loses_is_below_rounding_of_what_it_keeps(causal):
    """In every sum over the keys of a row, measured in float64 from the kernel's own record of what it left out."""
    shares = {}
    for case in cases(causal):
        lost = dropped(operators.run(inputs_of(case, causal))[3])
        shares[case[0]] = share_lost(case, causal, lost)
    assert shares["normal"] > 0.4
    assert shares["gates"] > 0.4
    assert shares["weighted gates"] > 0.4
    assert shares["a flat table and gates"] > 0.4
    assert shares["gates that attract the past"] < 0.1 or not causal
    assert shares["a growing table"] < 0.6


@pytest.mark.parametrize("causal", DIRECTIONS, ids=["causal", "bidirectional"])
def test_skipping_changes_nothing_beyond_rounding(causal):
    for name, q, k, v, table, total, weight in cases(causal):
        grad = torch.randn(q.shape)
        results = []
        for skip in (True, False):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            numbers = [None if x is None else x.detach().clone().requires_grad_() for x in (table, total, weight)]
            call = Call(LENGTH, LENGTH, causal=causal, scale=SCALE)
            out, _ = native.attention(*leaves, form(*numbers, causal), call, skip)
            out.backward(grad)
            results.append([out.detach(), *(x.grad for x in (*leaves, *numbers) if x is not None)])
        for skipped, complete in zip(*results, strict=True):
            # 2^−24 of what a row or a column could have received, and the rounding of sums of other terms.
            assert (skipped - complete).abs().max() <= 64 * EPSILON * complete.abs().max(), name


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("name", huge_factors())
def test_nothing_is_lost_where_a_tiny_weight_is_multiplied_by_a_huge_number(name, causal):
    check_huge_factors(name, causal, native.attention)


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
    padding[0, 384:448] = False  # an entire tile
    packed = torch.stack([documents(500, 200), documents(10, 690)])
    options = {"documents": packed, "padding": padding, "causal": causal}
    call = Call(keys, keys, causal=causal)
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
    out, _ = native.attention(q, k, v, Toeplitz(-torch.arange(640.0)[None], 0), Call(640, 640))
    complete, _ = native.attention(q, k, v, Toeplitz(-torch.arange(640.0)[None], 0), Call(640, 640), skip=False)
    assert torch.equal(out.isnan(), complete.isnan())
    assert native.skipped_fraction() == 0.0
    torch.testing.assert_close(out, complete, equal_nan=True)
