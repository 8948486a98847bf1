"""The biases that are the same for every input, each against its formula in the slowest and plainest way."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import (
    CLOSE,
    HEAD_DIM,
    HEADS,
    LENGTH,
    SCORE,
    SEEN,
    STATIC,
    TOEPLITZ,
    WIDTH,
    bias,
    build,
    copy,
    hidden,
    normal,
    qkv,
)
from torch.nn import functional as F
from torch.testing import assert_close

import relpos
from relpos.encodings.t5 import bucket
from relpos.forms.parameters import BoundedParameter, PositiveParameter

# Every static bias


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", TOEPLITZ)
def test_a_toeplitz_bias_is_a_function_of_the_distance(name, causal):
    written = build(name).map(40, causal=causal)
    assert torch.equal(written[:, 1:, 1:], written[:, :-1, :-1])
    assert written[:, -1, 0].isfinite().all()


@pytest.mark.parametrize("name", STATIC)
def test_a_longer_map_only_adds_rows_and_columns(name):
    position = build(name, length=20) if name == "fire" else build(name)
    for causal in (True, False) if position.bidirectional else (True,):
        longer, shorter = position.map(40, causal=causal)[:, :30, :30], position.map(30, causal=causal)
        # A power of a vector and of its tail, which takes another path in the CPU, differ in float32's last place.
        assert_close(longer, shorter, rtol=2.5e-7, atol=0.0)


@pytest.mark.parametrize("name", STATIC)
def test_a_static_bias_is_the_same_for_any_input(name):
    position = build(name)
    fixed = bias(position)
    for seed in (10, 20):
        q, k = 3 * normal(2, HEADS, LENGTH, HEAD_DIM, seed=seed), normal(2, HEADS, LENGTH, HEAD_DIM, seed=seed + 1)
        x = normal(2, LENGTH, WIDTH, seed=seed + 2)
        with torch.no_grad():
            added = relpos.scores(q, k, position, hidden=x) - relpos.scores(q, k)
        assert_close(added[:, :, SEEN], fixed[:, :, SEEN].expand(2, -1, -1), **CLOSE)


@pytest.mark.parametrize("name", [name for name in SCORE if name not in STATIC])
def test_a_bias_from_the_input_differs_with_the_input(name):
    position = build(name, base="cable") if name.startswith("dape") else build(name)
    q, k, _ = qkv()
    x = hidden()
    first = position.map(hidden=x, q=q, k=k)
    other = position.map(hidden=x.flip(1), q=q.flip(2), k=k.flip(2))
    assert (first - other)[:, :, SEEN].abs().max() > 1e-3


@pytest.mark.parametrize("name", [*SCORE, "nope"])
def test_a_map_is_the_mask_that_makes_pytorchs_attention_the_same(name):
    position = build(name)
    q, k, v = qkv()
    for causal in (True, False) if position.bidirectional else (True,):
        x = hidden() if position.needs_hidden else None
        scored = {"q": q, "k": k} if position.needs_scores else {}
        mask = position.map(LENGTH, hidden=x, causal=causal, **scored)
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.double())
        out = relpos.attention(q, k, v, position, hidden=x, causal=causal).detach()
        # A map of nothing but a length is float32.
        tolerance = CLOSE if mask.dtype == torch.float64 else {"rtol": 0.0, "atol": 1e-5}
        assert_close(out, expected, **tolerance)


@pytest.mark.parametrize("causal", [True, False])
def test_no_encoding_is_pytorchs_attention(causal):
    q, k, v = qkv()
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert_close(relpos.attention(q, k, v, causal=causal), expected, **CLOSE)
    assert_close(relpos.attention(q, k, v, relpos.encoding("nope", HEADS, HEAD_DIM), causal=causal), expected, **CLOSE)
    scaled = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.7)
    assert_close(relpos.attention(q, k, v, causal=causal, scale=0.7), scaled, **CLOSE)


@pytest.mark.parametrize("name", [name for name in STATIC if name != "nope"])
def test_the_bias_is_added_after_the_scaling_and_not_scaled(name):
    position = build(name)
    q, k, _ = qkv()
    with torch.no_grad():
        for scale in (0.1, 2.0):
            expected = scale * (q @ k.transpose(-1, -2)) + bias(position)
            assert_close(relpos.scores(q, k, position, scale=scale), expected, **CLOSE)


# ALiBi


def slopes(**options):
    return (-relpos.encoding("alibi", head_dim=8, **options).map(2)[:, 1, 0]).tolist()


def test_alibi_slopes_of_8_heads_are_halves_down_to_1_over_256():
    for rule in ("geometric", "press"):
        assert slopes(heads=8, slopes=rule) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


def test_press_slopes_of_12_heads_are_those_of_8_then_every_second_of_16():
    exponents = [-math.log2(m) for m in slopes(heads=12, slopes="press")]
    assert exponents == pytest.approx([1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5], abs=1e-6)  # float32 slopes


def test_geometric_slopes_are_2_to_the_minus_8h_over_heads_for_any_number_of_heads():
    for heads in (1, 3, 12, 20):
        exponents = [-math.log2(m) for m in slopes(heads=heads)]
        assert exponents == pytest.approx([8 * h / heads for h in range(1, heads + 1)], abs=1e-6)


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32, 64])
def test_geometric_and_press_slopes_agree_for_powers_of_two(heads):
    assert slopes(heads=heads) == slopes(heads=heads, slopes="press")


def test_geometric_and_press_slopes_differ_for_12_heads():
    assert max(abs(a - b) for a, b in zip(slopes(heads=12), slopes(heads=12, slopes="press"), strict=True)) > 0.1


def test_alibi_is_minus_slope_times_distance_in_both_directions():
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).double()
    for causal in (True, False):
        expected = -torch.tensor([2 ** (-8 * h / HEADS) for h in (1, 2, 3)]).double()[:, None, None] * distance.abs()
        if causal:
            expected = expected.masked_fill(~SEEN, -torch.inf)
        written = bias(relpos.encoding("alibi", HEADS, HEAD_DIM), causal=causal)[0]
        assert_close(written, expected, rtol=0.0, atol=1e-6)  # the slopes of the test are float32


# KERPLE


def test_kerple_power_with_exponent_1_is_alibi():
    alibi = relpos.encoding("alibi", heads=8, head_dim=HEAD_DIM)
    position = relpos.encoding("kerple_power", heads=6, head_dim=HEAD_DIM).double()
    first = torch.tensor([2.0**-h for h in range(1, 7)], dtype=torch.float64)  # the other two are under the floor
    copy(position.r1.raw, PositiveParameter(first, 1e-2).raw)
    copy(position.r2.raw, BoundedParameter(torch.ones(6, dtype=torch.float64), 1e-2, 2.0).raw)
    for causal in (True, False):
        assert_close(bias(position, causal=causal), bias(alibi, causal=causal)[:, :6], **CLOSE)


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power"])
def test_kerple_is_its_formula(name):
    position = build(name)
    r1, r2 = position.r1(torch.float64).tolist(), position.r2(torch.float64).tolist()

    def expected(h, r):
        return -r1[h] * math.log(1 + r2[h] * r) if name == "kerple_log" else -r1[h] * r ** r2[h]

    for causal in (True, False):
        written = bias(position, causal=causal)[0]
        for h in range(HEADS):
            for i in range(LENGTH):
                for j in range(i + 1 if causal else LENGTH):
                    assert written[h, i, j].item() == pytest.approx(expected(h, abs(i - j)), abs=1e-10)


raw = st.floats(-30, 30)


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power"])
@given(raw1=raw, raw2=raw)
@settings(max_examples=60, deadline=None)
def test_kerple_is_zero_on_the_diagonal_and_falls_with_distance(name, raw1, raw2):
    position = relpos.encoding(name, 1, HEAD_DIM).double()
    copy(position.r1.raw, [raw1])
    copy(position.r2.raw, [raw2])
    last = bias(position, 30)[0, 0, -1].flip(0)  # by distance
    assert last[0] == 0
    assert (last.diff() < 0).all()
    assert last.isfinite().all()


@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False))
@settings(max_examples=200, deadline=None)
def test_kerples_parameters_stay_in_their_range_whatever_the_raw_number(value):
    for name in ("kerple_log", "kerple_power"):
        position = relpos.encoding(name, 1, HEAD_DIM)
        copy(position.r1.raw, [value])
        copy(position.r2.raw, [value])
        for dtype in (torch.float32, torch.float64):
            floor = torch.tensor(1e-2, dtype=dtype)
            r1, r2 = position.r1(dtype), position.r2(dtype)
            assert floor <= r1 < torch.inf
            assert floor <= r2 < torch.inf
            if name == "kerple_power":
                assert r2 <= 2


# T5 and clipped


def test_t5_buckets_begin_at_their_known_distances():
    buckets = bucket(torch.arange(1000), causal=True).tolist()
    firsts = [buckets.index(b) for b in range(32)]
    assert firsts == [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    assert buckets == sorted(buckets)


def test_t5_reads_one_number_a_bucket_and_head():
    position = build("t5")
    last = bias(position, 130)[0, :, -1].flip(-1)  # by distance
    assert_close(last[:, :16], position.table[:, :16].detach(), **CLOSE)
    assert_close(last[:, 16:19], position.table[:, 16:17].detach().expand(-1, 3), **CLOSE)
    assert_close(last[:, 113:], position.table[:, 31:].detach().expand(-1, 17), **CLOSE)


def test_t5_in_both_directions_keeps_past_and_future_apart():
    position = build("t5")
    both = bias(position, causal=False)[0]
    for r in range(1, 8):
        assert_close(both[:, r, 0], position.table[:, r].detach(), **CLOSE)  # past
        assert_close(both[:, 0, r], position.table[:, 16 + r].detach(), **CLOSE)  # future


def test_clipped_is_constant_beyond_its_limit():
    position = build("clipped", limit=5)
    for causal in (True, False):
        written = bias(position, 20, causal=causal)[0]
        for r in range(0 if causal else -19, 20):
            expected = position.table[:, 5 + max(-5, min(5, r))].detach()  # distance −limit comes first
            i, j = (r, 0) if r >= 0 else (0, -r)
            assert_close(written[:, i, j], expected, **CLOSE)


# FIRE


def fire_arguments(length, threshold, c=0.1):
    """ψ(i − j) / ψ(max(i, ℓ)) from the encoding itself, with f the identity on numbers from 0 up."""
    position = relpos.encoding("fire", 1, HEAD_DIM, length=threshold, units=1, c=c).double()
    for parameter, value in ((position.inner.weight, 1), (position.outer.weight, 1)):
        copy(parameter, [[value]])
    copy(position.inner.bias, [0])
    copy(position.outer.bias, [0])
    return bias(position, length)[0, 0]


@pytest.mark.parametrize("leak", [0, 0.01, 0.4, 1])
def test_fire_is_its_formula(leak):
    position = build("fire", length=6, units=7, leak=leak)
    copy(position.stretch.raw, PositiveParameter(torch.tensor(1.4, dtype=torch.float64)).raw)
    c, threshold = position.c(torch.float64).item(), 6 * position.stretch(torch.float64).item()
    slope, shift = position.inner.weight[:, 0].tolist(), position.inner.bias.tolist()
    out, offset = position.outer.weight.tolist(), position.outer.bias.tolist()
    assert threshold == pytest.approx(8.4)  # the multiplier tells
    written = bias(position)[0]
    for h in range(HEADS):
        for i in range(LENGTH):
            for j in range(i + 1):
                x = math.log(c * (i - j) + 1) / math.log(c * max(i, threshold) + 1)
                units = [max(a * x + b, leak * (a * x + b)) for a, b in zip(slope, shift, strict=True)]
                expected = sum(w * u for w, u in zip(out[h], units, strict=True)) + offset[h]
                assert written[h, i, j].item() == pytest.approx(expected, abs=1e-10)


def plain_fire(position, i, j):
    """f_h(ψ(|i − j|) / ψ(max(i, j, ℓ))) of every head, by plain sums."""
    c, threshold = position.c(torch.float64).item(), position.length * position.stretch(torch.float64).item()
    x = math.log(c * abs(i - j) + 1) / math.log(c * max(i, j, threshold) + 1)
    pairs = zip(position.inner.weight[:, 0].tolist(), position.inner.bias.tolist(), strict=True)
    units = [max(a * x + b, position.leak * (a * x + b)) for a, b in pairs]
    return [
        sum(w * u for w, u in zip(row, units, strict=True)) + offset
        for row, offset in zip(position.outer.weight.tolist(), position.outer.bias.tolist(), strict=True)
    ]


@pytest.mark.parametrize("leak", [0, 0.4])
def test_symmetric_fire_is_its_formula_in_both_directions(leak):
    position = build("fire", length=6, units=7, leak=leak, symmetric=True)
    written = bias(position, causal=False)[0]
    for i in range(LENGTH):
        for j in range(LENGTH):
            assert written[:, i, j].tolist() == pytest.approx(plain_fire(position, i, j), abs=1e-10)
    assert_close(written.mT, written, **CLOSE)
    assert_close(bias(position)[0], written.masked_fill(~SEEN, -torch.inf), **CLOSE)
    assert torch.equal(bias(position), bias(build("fire", length=6, units=7, leak=leak)))


@torch.no_grad()
def test_symmetric_fire_knows_given_positions_and_where_the_queries_stand():
    position = build("fire", length=6, units=7, symmetric=True)
    zero = torch.zeros(2, HEADS, LENGTH, HEAD_DIM, dtype=torch.float64)
    positions = torch.tensor([[*range(5), *range(20, 29)], [*range(0, 28, 2)]])
    written = relpos.scores(zero, zero, position, causal=False, positions=positions)
    beyond = relpos.scores(zero, zero[:, :, :5], position, causal=False, start=3)  # queries 3 … 16, keys 0 … 4
    for i in range(LENGTH):
        for j in range(LENGTH):
            for row, p in enumerate(positions.tolist()):
                assert written[row, :, i, j].tolist() == pytest.approx(plain_fire(position, p[i], p[j]), abs=1e-10)
            if j < 5:
                assert beyond[0, :, i, j].tolist() == pytest.approx(plain_fire(position, i + 3, j), abs=1e-10)


def test_fires_argument_is_below_1_but_for_the_first_key_past_the_threshold():
    length, threshold = 40, 12
    x = fire_arguments(length, threshold)
    seen = x[torch.ones(length, length).tril().bool()]
    assert seen.min() == 0
    assert seen.max() <= 1
    full = (x >= 1).nonzero().tolist()
    assert full == [[i, 0] for i in range(threshold, length)]  # positions count from 0, so r = i at the first key


def test_fire_starts_with_c_a_tenth_and_the_threshold_at_the_trained_length():
    position = relpos.encoding("fire", 1, HEAD_DIM, length=512)
    assert position.c(torch.float64).item() == pytest.approx(0.1, abs=1e-6)  # a float32 parameter
    assert 512 * position.stretch(torch.float64).item() == pytest.approx(512, abs=1e-3)
    expected = math.log(0.1 * 3 + 1) / math.log(0.1 * 12 + 1)
    assert fire_arguments(20, 12)[5, 2].item() == pytest.approx(expected, abs=1e-6)


def test_fire_is_f_of_0_on_the_whole_diagonal():
    position = build("fire", length=6)
    with torch.no_grad():
        f0 = position.outer(torch.relu(position.inner(torch.zeros(1, dtype=torch.float64))))
    assert_close(bias(position)[0].diagonal(dim1=1, dim2=2), f0[:, None].expand(-1, LENGTH), **CLOSE)


def test_fire_is_toeplitz_up_to_its_threshold_and_not_beyond():
    position = build("fire", length=9)
    copy(position.stretch.raw, PositiveParameter(torch.tensor(1.0, dtype=torch.float64)).raw)  # ℓ = 9
    written = bias(position, 20)[0]
    assert_close(written[:, 1:10, 1:10].tril(), written[:, :9, :9].tril(), **CLOSE)
    for i in range(10, 20):
        assert (written[:, i, 1:i] - written[:, i - 1, : i - 1]).abs().max() > 1e-4


# Sandwich


@pytest.mark.parametrize("dim", [None, 12])
def test_sandwich_is_its_formula_zero_at_0_and_never_positive(dim):
    position = relpos.encoding("sandwich", HEADS, HEAD_DIM, dim=dim)
    d = dim or HEAD_DIM
    for causal in (True, False):
        written = bias(position, 50, causal=causal)[0]
        assert (written.diagonal(dim1=1, dim2=2) == 0).all()
        assert (written <= 0).all()
        for h in range(HEADS):
            for r in range(50):
                waves = sum(math.cos(r / 10000 ** (2 * k / d)) for k in range(1, d // 2 + 1))
                expected = (waves - d / 2) * HEADS / (8 * (h + 1))
                assert written[h, r, 0].item() == pytest.approx(expected, abs=1e-10)
                if not causal:
                    assert written[h, 0, r].item() == pytest.approx(expected, abs=1e-10)
