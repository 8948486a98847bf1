"""Closed forms and identities: each encoding against its formula, computed again in the slowest and plainest way.

float64 wherever a formula is compared, so that a tolerance of 1e-10 leaves room for rounding and for nothing else.
"""

import cmath
import inspect
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.testing import assert_close

import relpos
from relpos.encodings.call import Call
from relpos.encodings.positive import Between, Positive
from relpos.encodings.rope_scaling import SCALINGS
from relpos.encodings.t5 import bucket

HEADS, HEAD_DIM, LENGTH = 3, 8, 14
WIDTH = HEADS * HEAD_DIM
CLOSE = {"rtol": 0.0, "atol": 1e-10}
SEEN = torch.ones(LENGTH, LENGTH).tril().bool()

SCORE = [name for name in relpos.names() if relpos.card(name).place == "score"]
TOEPLITZ = [name for name in relpos.names() if relpos.card(name).form == "Toeplitz"]
STATIC = [*TOEPLITZ, "fire", "nope"]


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def made(name, heads=HEADS, head_dim=HEAD_DIM, **options):
    """An encoding in float64, its parameters moved off their start (some start at 0, where nothing can be seen)."""
    torch.manual_seed(5)
    position = relpos.encoding(name, heads, head_dim, **options).double()
    with torch.no_grad():
        for parameter in position.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return position


def qkv(length=LENGTH, heads=HEADS, head_dim=HEAD_DIM, batch=2):
    return tuple(normal(batch, heads, length, head_dim, seed=seed) for seed in (1, 2, 3))


def hidden(length=LENGTH, width=WIDTH, batch=2):
    return normal(batch, length, width, seed=4)


@torch.no_grad()
def bias(position, length=LENGTH, causal=True, x=None):
    """The bias in float64: the scores of queries and keys that are all 0."""
    zero = torch.zeros(1 if x is None else len(x), position.heads, length, position.head_dim, dtype=torch.float64)
    return relpos.scores(zero, zero, position, hidden=x, causal=causal)


def copy(parameter, value):
    with torch.no_grad():
        parameter.copy_(torch.as_tensor(value, dtype=parameter.dtype))


def softplus(z):
    return math.log1p(math.exp(-abs(z))) + max(z, 0.0)


def unsoftplus(y):
    return math.log(math.expm1(y))


def affine(linear, x):
    """w_h·x_t + b_h by plain sums: a list of (heads × length) for x (length, width)."""
    w, b, rows = linear.weight.tolist(), linear.bias.tolist(), x.tolist()
    return [[sum(a * c for a, c in zip(w[h], row, strict=True)) + b[h] for row in rows] for h in range(len(w))]


# Every static bias


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", TOEPLITZ)
def test_a_toeplitz_bias_is_a_function_of_the_distance(name, causal):
    written = made(name).map(40, causal=causal)
    assert torch.equal(written[:, 1:, 1:], written[:, :-1, :-1])
    assert written[:, -1, 0].isfinite().all()


@pytest.mark.parametrize("name", STATIC)
def test_a_longer_map_only_adds_rows_and_columns(name):
    position = made(name, length=20) if name == "fire" else made(name)
    for causal in (True, False) if position.bidirectional else (True,):
        longer, shorter = position.map(40, causal=causal)[:, :30, :30], position.map(30, causal=causal)
        # A power of a vector and of its tail, which takes another path in the CPU, differ in float32's last place.
        assert_close(longer, shorter, rtol=2.5e-7, atol=0.0)


@pytest.mark.parametrize("name", STATIC)
def test_a_static_bias_is_the_same_for_any_input(name):
    position = made(name)
    fixed = bias(position)
    for seed in (10, 20):
        q, k = 3 * normal(2, HEADS, LENGTH, HEAD_DIM, seed=seed), normal(2, HEADS, LENGTH, HEAD_DIM, seed=seed + 1)
        x = normal(2, LENGTH, WIDTH, seed=seed + 2)
        with torch.no_grad():
            added = relpos.scores(q, k, position, hidden=x) - relpos.scores(q, k)
        assert_close(added[:, :, SEEN], fixed[:, :, SEEN].expand(2, -1, -1), **CLOSE)


@pytest.mark.parametrize("name", [name for name in SCORE if name not in STATIC])
def test_a_bias_from_the_input_differs_with_the_input(name):
    position = made(name, base="cable") if name.startswith("dape") else made(name)
    q, k, _ = qkv()
    x = hidden()
    first = position.map(hidden=x, q=q, k=k)
    other = position.map(hidden=x.flip(1), q=q.flip(2), k=k.flip(2))
    assert (first - other)[:, :, SEEN].abs().max() > 1e-3


@pytest.mark.parametrize("name", [*SCORE, "nope"])
def test_a_map_is_the_mask_that_makes_pytorchs_attention_the_same(name):
    position = made(name)
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
    position = made(name)
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
    copy(position.r1.raw, Positive(first, 1e-2).raw)
    copy(position.r2.raw, Between(torch.ones(6, dtype=torch.float64), 1e-2, 2.0).raw)
    for causal in (True, False):
        assert_close(bias(position, causal=causal), bias(alibi, causal=causal)[:, :6], **CLOSE)


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power"])
def test_kerple_is_its_formula(name):
    position = made(name)
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
    position = made("t5")
    last = bias(position, 130)[0, :, -1].flip(-1)  # by distance
    assert_close(last[:, :16], position.table[:, :16].detach(), **CLOSE)
    assert_close(last[:, 16:19], position.table[:, 16:17].detach().expand(-1, 3), **CLOSE)
    assert_close(last[:, 113:], position.table[:, 31:].detach().expand(-1, 17), **CLOSE)


def test_t5_in_both_directions_keeps_past_and_future_apart():
    position = made("t5")
    both = bias(position, causal=False)[0]
    for r in range(1, 8):
        assert_close(both[:, r, 0], position.table[:, r].detach(), **CLOSE)  # past
        assert_close(both[:, 0, r], position.table[:, 16 + r].detach(), **CLOSE)  # future


def test_clipped_is_constant_beyond_its_limit():
    position = made("clipped", limit=5)
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


def test_fire_is_its_formula():
    position = made("fire", length=6, units=7)
    copy(position.stretch.raw, Positive(torch.tensor(1.4, dtype=torch.float64)).raw)
    c, threshold = position.c(torch.float64).item(), 6 * position.stretch(torch.float64).item()
    slope, shift = position.inner.weight[:, 0].tolist(), position.inner.bias.tolist()
    out, offset = position.outer.weight.tolist(), position.outer.bias.tolist()
    assert threshold == pytest.approx(8.4)  # the multiplier tells
    written = bias(position)[0]
    for h in range(HEADS):
        for i in range(LENGTH):
            for j in range(i + 1):
                x = math.log(c * (i - j) + 1) / math.log(c * max(i, threshold) + 1)
                units = [max(0.0, a * x + b) for a, b in zip(slope, shift, strict=True)]
                expected = sum(w * u for w, u in zip(out[h], units, strict=True)) + offset[h]
                assert written[h, i, j].item() == pytest.approx(expected, abs=1e-10)


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
    position = made("fire", length=6)
    with torch.no_grad():
        f0 = position.outer(torch.relu(position.inner(torch.zeros(1, dtype=torch.float64))))
    assert_close(bias(position)[0].diagonal(dim1=1, dim2=2), f0[:, None].expand(-1, LENGTH), **CLOSE)


def test_fire_is_toeplitz_up_to_its_threshold_and_not_beyond():
    position = made("fire", length=9)
    copy(position.stretch.raw, Positive(torch.tensor(1.0, dtype=torch.float64)).raw)  # ℓ = 9
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


# CABLE


def running(linear, x, step):
    """S = cumsum(step(w·x + b)) by plain sums: heads × length."""
    steps = [[max(z, 0.0) if step == "relu" else softplus(z) for z in row] for row in affine(linear, x)]
    return [[math.fsum(row[: t + 1]) for t in range(len(row))] for row in steps]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("step", ["relu", "softplus"])
@pytest.mark.parametrize("name", ["cable", "cable_nw", "kcable"])
def test_cable_is_its_formula(name, step, causal):
    position, x = made(name, step=step), hidden()
    inner = position.cable if name == "kcable" else position
    written = bias(position, causal=causal, x=x)
    for b in range(len(x)):
        S = running(inner.steps, x[b], step)
        G = [[softplus(z) for z in row] for row in affine(position.weights, x[b])] if name == "cable" else None
        for h in range(HEADS):
            for i in range(LENGTH):
                for j in range(i + 1 if causal else LENGTH):
                    gained = abs(S[h][i] - S[h][j])
                    expected = -math.log(1 + gained**2) if name == "kcable" else -gained * (G[h][i] if G else 1)
                    assert written[b, h, i, j].item() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("name", ["cable", "cable_nw", "kcable", "forgetting"])
def test_learned_distances_are_0_on_the_diagonal_and_never_positive(name):
    position = made(name)
    for causal in (True, False) if position.bidirectional else (True,):
        written = bias(position, causal=causal, x=hidden())
        assert (written.diagonal(dim1=2, dim2=3) == 0).all()
        assert (written <= 0).all()
        assert written[:, :, -1, 0].max() < 0


@pytest.mark.parametrize("name", ["cable_nw", "forgetting"])
def test_learned_distances_without_a_weight_add_up(name):
    written = bias(made(name), x=hidden())
    for i, j, k in ((9, 4, 0), (13, 12, 3), (7, 7, 2), (13, 6, 6)):
        assert_close(written[:, :, i, j] + written[:, :, j, k], written[:, :, i, k], **CLOSE)


def test_weighted_distances_do_not_add_up():
    written = bias(made("cable"), x=hidden())
    assert (written[:, :, 9, 4] + written[:, :, 4, 0] - written[:, :, 9, 0]).abs().max() > 1e-2


def test_cable_with_steps_of_1_and_a_constant_weight_is_alibi():
    position, alibi = made("cable"), relpos.encoding("alibi", HEADS, HEAD_DIM)
    for gate in (position.steps, position.weights):
        copy(gate.weight, torch.zeros(HEADS, WIDTH))
    copy(position.steps.bias, [1.0] * HEADS)
    copy(position.weights.bias, torch.tensor([unsoftplus(m) for m in alibi.slopes], dtype=torch.float64))
    for causal in (True, False):
        written = bias(position, causal=causal, x=hidden())
        assert_close(written, bias(alibi, causal=causal).expand(2, -1, -1, -1), **CLOSE)


@pytest.mark.parametrize("name", ["cable", "cable_nw", "forgetting"])
@torch.no_grad()
def test_one_more_dimension_of_queries_and_keys_does_the_same(name):
    # Softmax over j does not see terms of i alone, so −g_i·(S_i − S_j) acts as g_i·S_j.
    position, x = made(name), hidden()
    q, k, v = qkv()
    gates = position.gates(x)
    S = -gates[..., 0].cumsum(-1) if name == "forgetting" else gates[..., 0].cumsum(-1)
    g = gates[..., 1] if name == "cable" else torch.ones_like(S)
    wider_q = torch.cat([q * HEAD_DIM**-0.5, g[..., None]], dim=-1)
    wider_k = torch.cat([k, S[..., None]], dim=-1)
    expected = F.scaled_dot_product_attention(wider_q, wider_k, v, is_causal=True, scale=1.0)
    assert_close(relpos.attention(q, k, v, position, hidden=x), expected, **CLOSE)


# Forgetting


def test_forgetting_is_its_formula():
    position, x = made("forgetting"), hidden()
    written = bias(position, x=x)
    for b in range(len(x)):
        z = affine(position.gate, x[b])
        for h in range(HEADS):
            for i in range(LENGTH):
                for j in range(i + 1):
                    expected = math.fsum(math.log(1 / (1 + math.exp(-z[h][t]))) for t in range(j + 1, i + 1))
                    assert written[b, h, i, j].item() == pytest.approx(expected, abs=1e-10)


def test_a_constant_forget_gate_is_alibi():
    position, alibi = made("forgetting"), relpos.encoding("alibi", HEADS, HEAD_DIM)
    copy(position.gate.weight, torch.zeros(HEADS, WIDTH))
    biases = [-unsoftplus(m) for m in alibi.slopes]  # log σ(b) = −m
    copy(position.gate.bias, torch.tensor(biases, dtype=torch.float64))
    assert_close(bias(position, x=hidden()), bias(alibi).expand(2, -1, -1, -1), **CLOSE)


def test_a_forget_gate_that_stays_open_is_no_encoding():
    position = made("forgetting")
    copy(position.gate.weight, torch.zeros(HEADS, WIDTH))
    copy(position.gate.bias, [40.0] * HEADS)  # log σ(40) = −4e-18
    q, k, v = qkv()
    assert_close(relpos.attention(q, k, v, position, hidden=hidden()), relpos.attention(q, k, v), **CLOSE)


def test_forgetting_is_softplus_cable_without_weight_and_the_sign_turned():
    forgetting, cable = made("forgetting"), made("cable_nw", step="softplus")
    copy(cable.steps.weight, -forgetting.gate.weight)
    copy(cable.steps.bias, -forgetting.gate.bias)
    assert_close(bias(forgetting, x=hidden()), bias(cable, x=hidden()), **CLOSE)


# CoPE


@pytest.mark.parametrize("scaled", [False, True])
def test_cope_is_its_formula(scaled):
    position = made("cope", npos=5, scaled=scaled)
    q, k, _ = qkv(batch=1)
    written = position.map(q=q, k=k)[0]
    e = position.table.tolist()
    capped = 0
    for h in range(HEADS):
        Q, K = q[0, h].tolist(), k[0, h].tolist()
        for i in range(LENGTH):
            dots = [sum(a * b for a, b in zip(Q[i], K[t], strict=True)) for t in range(i + 1)]
            gates = [1 / (1 + math.exp(-z * (HEAD_DIM**-0.5 if scaled else 1))) for z in dots]
            for j in range(i + 1):
                p = min(math.fsum(gates[j:]), 4.0)
                capped += p == 4.0
                low, high, w = math.floor(p), math.ceil(p), p - math.floor(p)
                expected = sum(a * ((1 - w) * x + w * y) for a, x, y in zip(Q[i], e[low], e[high], strict=True))
                assert written[h, i, j].item() == pytest.approx(expected, abs=1e-10)
    assert 20 < capped < HEADS * LENGTH * (LENGTH + 1) / 2 - 20  # both sides of the cap are visited


@pytest.mark.parametrize("npos", [64, 6])
def test_cope_with_open_gates_counts_from_1_at_the_query_itself(npos):
    position = relpos.encoding("cope", 1, 1, npos=npos).double()
    copy(position.table, (torch.arange(npos)[:, None] ** 2).double())  # e[p] = p²: B_ij tells p
    q = torch.full((1, 1, LENGTH, 1), 10.0, dtype=torch.float64)  # q·k = 100, and σ(100) is 1 in float64
    p = (position.map(q=q, k=q)[0, 0] / 10).sqrt()
    expected = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH) + 1).clamp(max=npos - 1).double()
    assert_close(p[SEEN], expected[SEEN], **CLOSE)


def test_cope_starts_as_plain_attention():
    position = relpos.encoding("cope", HEADS, HEAD_DIM).double()
    q, k, v = qkv()
    assert_close(relpos.attention(q, k, v, position).detach(), relpos.attention(q, k, v), **CLOSE)


# DAPE


@pytest.mark.parametrize("base", SCORE)
@pytest.mark.parametrize("name", ["dape", "dapev2"])
@torch.no_grad()
def test_dape_with_a_zero_network_is_its_base(name, base):
    position = made(name, base=base)
    for parameter in position.second.parameters():
        parameter.zero_()
    q, k, _ = qkv()
    x = hidden()
    for causal in (True, False) if position.bidirectional else (True,):
        expected = relpos.scores(q, k, position.base, hidden=x, causal=causal)
        assert_close(relpos.scores(q, k, position, hidden=x, causal=causal), expected, **CLOSE)
    assert (expected - relpos.scores(q, k, causal=causal))[:, :, SEEN].abs().max() > 1e-3  # the base does something


@torch.no_grad()
def test_dape_is_its_formula():
    position = made("dape", base="alibi")
    q, k, _ = qkv()
    A = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(HEAD_DIM)
    for causal in (True, False):
        B = bias(relpos.encoding("alibi", HEADS, HEAD_DIM), causal=causal).expand(2, -1, -1, -1)
        finite = B.masked_fill(-torch.inf == B, 0.0)
        units = torch.einsum("uc,bcij->buij", position.first.weight, torch.cat([A, finite], dim=1))
        units = units + position.first.bias[:, None, None]
        units = torch.where(units > 0, units, 0.01 * units)
        added = torch.einsum("hu,buij->bhij", position.second.weight, units) + position.second.bias[:, None, None]
        assert_close(relpos.scores(q, k, position, causal=causal), A + B + added, **CLOSE)
        assert added.abs().max() > 0.1


@torch.no_grad()
def test_dapev2_is_its_formula():
    position = made("dapev2", base="alibi", units=5)
    q, k, _ = qkv(batch=1)
    A = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(HEAD_DIM)
    B = bias(relpos.encoding("alibi", HEADS, HEAD_DIM))
    written = relpos.scores(q, k, position)[0]
    W1, b1 = position.first.weight[:, :, 0], position.first.bias  # (units, 2·heads, 3)
    W2, b2 = position.second.weight[:, :, 0], position.second.bias  # (heads, units, 3)
    for i in range(LENGTH):  # a row by itself knows nothing of the keys after it
        row = torch.cat([A[0, :, i, : i + 1], B[0, :, i, : i + 1]])  # (2·heads, i + 1)
        for W, b in ((W1, b1), (W2, b2)):
            if W is W2:
                row = torch.where(row > 0, row, 0.01 * row)
            columns = [
                b + sum(W[:, :, t] @ row[:, j + t - 1] for t in range(3) if 0 <= j + t - 1 <= i) for j in range(i + 1)
            ]
            row = torch.stack(columns, dim=1)
        expected = A[0, :, i, : i + 1] + B[0, :, i, : i + 1] + row
        assert_close(written[:, i, : i + 1], expected, **CLOSE)


@pytest.mark.parametrize("base", ["alibi", "kerple_log", "fire", "cope"])
@torch.no_grad()
def test_a_later_key_leaves_dapev2s_row_alone(base):
    position = made("dapev2", base=base)
    q, k, _ = qkv()
    before = relpos.scores(q, k, position)
    for later in range(1, LENGTH):
        changed = k.clone()
        changed[:, :, later] += 5.0
        after = relpos.scores(q, changed, position)
        assert torch.equal(after[:, :, :later], before[:, :, :later])
        assert (after[:, :, later, : later + 1] - before[:, :, later, : later + 1]).abs().max() > 1e-2


# RoPE


def angle_of(position, n=1, length=2):
    """The angle by which each pair is turned at position n of a sequence of this length, seen from outside."""
    x = torch.zeros(1, 1, length, position.head_dim, dtype=torch.float64)
    x[..., : position.head_dim // 2] = 1.0  # the first of each pair (half layout)
    turned, _ = position.rotate(x, x, Call(length, length, dtype=torch.float64))
    first, second = turned[0, 0, n].chunk(2)
    return torch.atan2(second, first)


def rope(head_dim=HEAD_DIM, heads=HEADS, **options):
    return relpos.encoding("rope", heads, head_dim, **options)


def pairs_of(x, layout):
    """The pairs of x (head_dim,) as complex numbers."""
    half = len(x) // 2
    if layout == "half":
        return [complex(x[n], x[n + half]) for n in range(half)]
    return [complex(x[2 * n], x[2 * n + 1]) for n in range(half)]


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_scores_are_the_complex_product_of_the_pairs(layout):
    q, k, _ = qkv(batch=1)
    written = relpos.scores(q, k, rope(layout=layout), causal=False)[0]
    for h in range(HEADS):
        Q = [pairs_of(row, layout) for row in q[0, h].tolist()]
        K = [pairs_of(row, layout) for row in k[0, h].tolist()]
        for i in range(LENGTH):
            for j in range(LENGTH):
                dot = sum(
                    (a * b.conjugate() * cmath.exp(1j * (i - j) * 10000 ** (-2 * n / HEAD_DIM))).real
                    for n, (a, b) in enumerate(zip(Q[i], K[j], strict=True))
                )
                assert written[h, i, j].item() == pytest.approx(dot / math.sqrt(HEAD_DIM), abs=1e-10)


def scaled(scaling):
    more = {"rope_parameters": {"short_factor": [1, 2, 3, 4], "long_factor": [2, 3, 4, 5]}}
    return {"scaling": scaling, "factor": 4.0, "length": 64, **(more if scaling == "longrope" else {})}


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("scaling", sorted(SCALINGS))
def test_rope_scores_do_not_see_a_common_shift(scaling, layout):
    q, k, _ = qkv(40)  # within the trained length of 64, where a longer sequence changes nothing
    position = rope(layout=layout, **scaled(scaling))
    late = relpos.scores(q, k, position, causal=False)[:, :, 17:, 17:]
    assert_close(late, relpos.scores(q[:, :, 17:], k[:, :, 17:], position, causal=False), **CLOSE)
    assert (late - relpos.scores(q, k, causal=False)[:, :, 17:, 17:]).abs().max() > 0.1


def test_the_two_layouts_are_one_up_to_the_order_of_dimensions():
    q, k, _ = qkv()
    order = [n + half for n in range(HEAD_DIM // 2) for half in (0, HEAD_DIM // 2)]  # 0, 4, 1, 5, 2, 6, 3, 7
    halves = relpos.scores(q, k, rope(layout="half"))
    interleaved = rope(layout="interleaved")
    assert_close(relpos.scores(q[..., order], k[..., order], interleaved), halves, **CLOSE)
    assert (relpos.scores(q, k, interleaved) - halves)[:, :, SEEN].abs().max() > 0.1


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_a_fraction_turns_the_first_dimensions_and_leaves_the_rest(layout):
    q, k, _ = qkv()
    turned = relpos.scores(q[..., :4], k[..., :4], rope(head_dim=4, layout=layout), scale=1.0)
    rest = relpos.scores(q[..., 4:], k[..., 4:], scale=1.0)
    written = relpos.scores(q, k, rope(layout=layout, fraction=0.5), scale=1.0)
    assert_close(written, turned + rest, **CLOSE)


def test_ntk_leaves_the_fastest_pair_and_stretches_the_slowest_by_the_factor():
    plain, stretched = angle_of(rope(64)), angle_of(rope(64, scaling="ntk", factor=8.0))
    ratio = plain / stretched
    assert ratio[0].item() == pytest.approx(1, rel=1e-12)
    assert ratio[-1].item() == pytest.approx(8, rel=1e-12)
    assert (ratio.diff() > 0).all()


def test_linear_scaling_at_f_times_n_is_the_default_at_n():
    stretched = rope(64, scaling="linear", factor=3.0)
    for n in (0, 1, 2):  # before an angle passes π and comes round
        assert_close(angle_of(stretched, 3 * n, 10), angle_of(rope(64), n, 10), rtol=0.0, atol=1e-12)


def test_dynamic_scaling_is_the_default_within_the_trained_length_and_ntk_beyond():
    position = rope(64, scaling="dynamic", factor=2.0, length=100)
    for length in (2, 99, 100):
        assert_close(angle_of(position, 1, length), angle_of(rope(64)), rtol=1e-12, atol=0.0)
    grown = angle_of(position, 1, 300)  # the factor is 2·300/100 − 1
    assert_close(grown, angle_of(rope(64, scaling="ntk", factor=5.0)), rtol=1e-12, atol=0.0)


def test_a_proportional_rope_keeps_the_frequencies_of_the_whole_head():
    theta = angle_of(rope(64, scaling="proportional", fraction=0.25))
    assert_close(theta[:8], angle_of(rope(64))[:8], rtol=1e-12, atol=0.0)
    assert (theta[8:] == 0).all()


# xPos


def test_xpos_scores_are_its_formula():
    q, k, _ = qkv(batch=1)
    written = relpos.scores(q, k, relpos.encoding("xpos", HEADS, HEAD_DIM, scale_base=16.0))[0]
    zeta = [(2 * n + 0.4 * HEAD_DIM) / (1.4 * HEAD_DIM) for n in range(HEAD_DIM // 2)]
    for h in range(HEADS):
        Q = [pairs_of(row, "interleaved") for row in q[0, h].tolist()]
        K = [pairs_of(row, "interleaved") for row in k[0, h].tolist()]
        for i in range(LENGTH):
            for j in range(i + 1):
                dot = sum(
                    (a * b.conjugate() * cmath.exp(1j * (i - j) * 10000 ** (-2 * n / HEAD_DIM))).real
                    * zeta[n] ** ((i - j) / 16)
                    for n, (a, b) in enumerate(zip(Q[i], K[j], strict=True))
                )
                assert written[h, i, j].item() == pytest.approx(dot / math.sqrt(HEAD_DIM), abs=1e-10)


def test_xpos_scores_of_equal_tokens_depend_on_the_distance_alone():
    q = normal(1, HEADS, 1, HEAD_DIM).expand(-1, -1, 600, -1)
    k = normal(1, HEADS, 1, HEAD_DIM, seed=1).expand(-1, -1, 600, -1)
    written = relpos.scores(q, k, relpos.encoding("xpos", HEADS, HEAD_DIM))
    assert_close(written[:, :, 1:, 1:], written[:, :, :-1, :-1], rtol=0.0, atol=1e-9)  # angles of 600


def test_xpos_decays_with_distance():
    one = torch.ones(1, 1, 2000, HEAD_DIM, dtype=torch.float64)
    written = relpos.scores(one, one, relpos.encoding("xpos", 1, HEAD_DIM))[0, 0, -1].flip(0)  # by distance
    assert written[1500:].abs().max() < 0.5 * written[:100].abs().max()


# Absolute


def test_learned_adds_its_row_to_each_token():
    position = made("learned", length=20)
    x = hidden()
    assert_close(position.embed(x).detach(), x + position.table[:LENGTH].detach(), **CLOSE)
    assert_close(position.embed(x, start=6).detach(), x + position.table[6:].detach(), **CLOSE)
    documents = torch.tensor([[4] * 5 + [2] * 9, [1] * 14])
    rows = torch.tensor([[*range(5), *range(9)], [*range(14)]])
    assert_close(position.embed(x, documents=documents).detach(), x + position.table[rows].detach(), **CLOSE)


@pytest.mark.parametrize("amplitude", [1.0, 0.1])
def test_sinusoidal_adds_its_waves_to_each_token(amplitude):
    position = relpos.encoding("sinusoidal", HEADS, HEAD_DIM, amplitude=amplitude)
    x = hidden()
    for start in (0, 300):
        added = position.embed(x, start=start) - x
        for n in range(LENGTH):
            for d in range(WIDTH):
                angle = (start + n) / 10000 ** (2 * (d // 2) / WIDTH)
                expected = amplitude * (math.cos(angle) if d % 2 else math.sin(angle))
                assert added[0, n, d].item() == pytest.approx(expected, abs=1e-10)


def test_absolute_encodings_do_nothing_inside_attention():
    q, k, v = qkv()
    for name in ("learned", "sinusoidal"):
        position = relpos.encoding(name, HEADS, HEAD_DIM)
        assert torch.equal(relpos.attention(q, k, v, position), relpos.attention(q, k, v))


def test_relative_encodings_do_nothing_to_the_embedding():
    x = hidden()
    for name in relpos.names():
        if relpos.card(name).place != "embedding":
            assert torch.equal(relpos.encoding(name, HEADS, HEAD_DIM).embed(x), x), name


# Precision


def test_alibi_is_exact_at_distance_300_for_half_precision_queries():
    position = relpos.encoding("alibi", 8, HEAD_DIM)
    for dtype in (torch.bfloat16, torch.float16):
        zero = torch.zeros(1, 8, 301, HEAD_DIM, dtype=dtype)
        written = relpos.scores(zero, zero, position)
        assert written.dtype == torch.float32
        assert written[0, :, 300, 0].tolist() == [-300 * 2.0**-h for h in range(1, 9)]  # bfloat16 would give 300 ± 1
        assert written[0, 0, 300, 1].item() == -149.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", relpos.names())
@torch.no_grad()
def test_half_precision_inputs_meet_float32_tables(name, dtype):
    position = made(name).float()
    q, k, v = (x.to(dtype) for x in qkv(300, batch=1))
    x = hidden(300, batch=1).to(dtype)
    half = relpos.scores(q, k, position, hidden=x)
    full = relpos.scores(q.float(), k.float(), position, hidden=x.float())
    assert half.dtype == torch.float32
    assert torch.equal(half, full)  # past position 256 bfloat16 cannot count; nothing here is counted in it
    out = relpos.attention(q, k, v, position, hidden=x)
    exact = relpos.attention(q.float(), k.float(), v.float(), position, hidden=x.float())
    assert out.dtype == dtype
    assert_close(out.float(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)  # rounded once, at the end


@pytest.mark.parametrize("name", relpos.names())
@torch.no_grad()
def test_float64_inputs_meet_float64_tables(name):
    position = made(name)
    q, k, v = qkv()
    x = hidden()
    assert relpos.scores(q, k, position, hidden=x).dtype == torch.float64
    assert relpos.attention(q, k, v, position, hidden=x).dtype == torch.float64
    single = relpos.scores(q.float(), k.float(), made(name).float(), hidden=x.float())
    double = relpos.scores(q, k, position, hidden=x)
    error = (single.double() - double)[:, :, SEEN].abs().max()
    assert 1e-9 < error < 1e-4  # float32 errs by its rounding and no more; float64 is not float32 in disguise


# Start values and the count of learned numbers

CARD_WIDTH = 5 * 6


@pytest.mark.parametrize("name", relpos.names())
def test_an_encoding_learns_as_many_numbers_as_its_card_says(name):
    position = relpos.encoding(name, heads=5, head_dim=6)
    H, d, width = Fraction(5), 6, CARD_WIDTH
    length = inspect.signature(type(position).__init__).parameters["length"].default if name == "learned" else 0
    known = {"H": H, "d": d, "width": width, "length": length, "base": 2}  # dape's base is kerple_log: 2 a head
    formula = relpos.card(name).learns.replace("·", "*")
    said = H * eval(formula, {"__builtins__": {}}, known)
    assert sum(parameter.numel() for parameter in position.parameters() if parameter.requires_grad) == said


def test_start_values_are_those_of_the_papers():
    torch.manual_seed(0)
    heads = 2000

    def spread(values):
        values = values.detach().flatten()
        return [values.mean().item(), values.std().item()]

    # Standard errors of these means and deviations over 2000 draws are under 0.015 for the uniform ones.
    log, power = relpos.encoding("kerple_log", heads, 2), relpos.encoding("kerple_power", heads, 2)
    for parameter, top in ((log.r1, 2.0), (log.r2, 1.0), (power.r1, 1.0), (power.r2, 2.0)):
        values = parameter(torch.float32)
        assert spread(values) == pytest.approx([top / 2, top / math.sqrt(12)], abs=0.05)
        assert values.max() <= top + 1e-5
    assert spread(relpos.encoding("clipped", 20, 8).table) == pytest.approx([0, 0.02], abs=0.001)
    assert spread(relpos.encoding("learned", 4, 8).table) == pytest.approx([0, 0.02], abs=0.001)
    for gate in (relpos.encoding("cable", 8, 64).steps, relpos.encoding("cable", 8, 64).weights):
        assert spread(gate.weight) == pytest.approx([0, 0.02], abs=0.002)
        assert (gate.bias == 0).all()
    assert (relpos.encoding("forgetting", 8, 64).gate.bias == 0).all()
    assert spread(relpos.encoding("forgetting", 8, 64).gate.weight) == pytest.approx([0, 0.02], abs=0.002)
    assert (relpos.encoding("cope", 4, 8).table == 0).all()
