"""What an encoding learns or fixes: how many values, where they start, their range, and their precision."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import HEAD_DIM, SEEN, bias, build, copy, hidden, qkv
from torch.testing import assert_close

import relpos

H, D = 5, 6  # heads, head_dim
WIDTH = H * D


def dape(units, base=2):  # over kerple_log, which has 2 values per head
    return base + 2 * units + Fraction(units, H) + units + 1


def dapev2(units, base=2):
    return base + 6 * units + Fraction(units, H) + 3 * units + 1


BY_HAND = [  # values per head
    ("alibi", {}, 0),
    ("cable", {}, 2 * (WIDTH + 1)),
    ("cable", {"width": 11}, 2 * 12),
    ("cable_nw", {}, WIDTH + 1),
    ("clipped", {}, 513),
    ("clipped", {"limit": 5}, 11),
    ("cope", {}, Fraction(64 * D, H)),
    ("cope", {"npos": 7}, Fraction(7 * D, H)),
    ("dape", {}, dape(32)),
    ("dape", {"units": 3}, dape(3)),
    ("dape", {"base": "alibi"}, dape(32, base=0)),
    ("dapev2", {}, dapev2(32)),
    ("dapev2", {"units": 3}, dapev2(3)),
    ("fire", {}, 33 + Fraction(66, H)),
    ("fire", {"units": 3}, 4 + Fraction(8, H)),
    ("forgetting", {}, WIDTH + 1),
    ("forgetting", {"width": 11}, 12),
    ("kcable", {}, WIDTH + 1),
    ("kcable", {"weighted": True}, 2 * (WIDTH + 1)),
    ("kerple_log", {}, 2),
    ("kerple_log", {"clamped": True}, 2),
    ("kerple_power", {}, 2),
    ("learned", {}, Fraction(1024 * WIDTH, H)),
    ("learned", {"length": 9, "width": 11}, Fraction(9 * 11, H)),
    *[(name, {}, 0) for name in ("nope", "rope", "sandwich", "sinusoidal", "temperature", "window", "xpos")],
    ("ssmax", {}, 1),
    ("sum", {}, WIDTH + 1),  # alibi and cable_nw
    ("sum", {"parts": ["t5", "kerple_log"]}, 34),
    ("sum", {"parts": ["t5", "alibi", "t5"], "part_options": {"t5": {"buckets": 8}}}, 16),  # of every part of its name
    ("t5", {}, 32),
    ("t5", {"buckets": 8}, 8),
]


@pytest.mark.parametrize(("name", "options", "values"), BY_HAND)
def test_an_encoding_learns_as_many_values_as_counted_by_hand(name, options, values):
    position = relpos.encoding(name, heads=H, head_dim=D, **options)
    assert position.learned_per_head == float(values)
    assert f"learned_per_head={float(values):g}" in repr(position)


def test_every_encoding_is_counted():
    assert {name for name, _, _ in BY_HAND} == set(relpos.names())


def test_a_frozen_parameter_is_not_counted_as_learned():
    position = relpos.encoding("kerple_log", heads=5, head_dim=6)
    position.r1.raw.requires_grad_(False)
    assert position.learned_per_head == 1


# Start values and ranges


def test_start_values_are_those_of_the_papers():
    torch.manual_seed(0)
    heads = 2000

    def spread(values):
        values = values.detach().flatten()
        return [values.mean().item(), values.std().item()]

    # Standard errors of these means and deviations over 2000 draws are under 0.015 for the uniform ones.
    log, power = relpos.encoding("kerple_log", heads, 2), relpos.encoding("kerple_power", heads, 2)
    clamped = relpos.encoding("kerple_log", heads, 2, clamped=True)
    tops = ((log.r1, 2.0), (log.r2, 1.0), (power.r1, 1.0), (power.r2, 2.0), (clamped.r1, 2.0), (clamped.r2, 1.0))
    for parameter, top in tops:
        values = parameter(torch.float32)
        assert spread(values) == pytest.approx([top / 2, top / math.sqrt(12)], abs=0.05)
        assert values.max() <= top + 1e-5
    cable = relpos.encoding("cable", 8, 64)
    gates = (cable.steps, cable.weights, relpos.encoding("forgetting", 8, 64).gate)
    tables = (relpos.encoding("clipped", 20, 8).table, relpos.encoding("learned", 4, 8).weight)
    for table in (*tables, *(gate.weight for gate in gates)):
        assert spread(table) == pytest.approx([0, 0.02], abs=0.002)
    assert all((gate.bias == 0).all() for gate in gates)
    assert (relpos.encoding("cope", 4, 8).table == 0).all()
    fire = relpos.encoding("fire", 1, HEAD_DIM, length=512)
    assert fire.c(torch.float64).item() == pytest.approx(0.1, abs=1e-6)  # a float32 parameter
    assert 512 * fire.stretch(torch.float64).item() == pytest.approx(512, abs=1e-3)
    other = relpos.encoding("fire", 500, HEAD_DIM, absolute=True, initial_std=0.02)
    assert other.c(torch.float64).item() == pytest.approx(0.1, abs=1e-6)
    assert spread(other.outer.weight) == pytest.approx([0, 0.02], abs=0.002)
    assert not other.inner.bias.any()
    assert not other.outer.bias.any()
    assert relpos.encoding("ssmax", 3, HEAD_DIM, start=0.43).s.tolist() == pytest.approx([0.43] * 3)


raw = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power"])
@given(raw1=raw | st.floats(-30, 30), raw2=raw | st.floats(-30, 30))
@settings(max_examples=100, deadline=None)
def test_kerple_stays_in_range_and_falls_with_distance_whatever_the_raw_numbers(name, raw1, raw2):
    position = relpos.encoding(name, 1, HEAD_DIM).double()
    copy(position.r1.raw, [raw1])
    copy(position.r2.raw, [raw2])
    for dtype in (torch.float32, torch.float64):
        floor = torch.tensor(1e-2, dtype=dtype)
        r1, r2 = position.r1(dtype), position.r2(dtype)
        assert floor <= r1 < torch.inf
        assert floor <= r2 < torch.inf
        assert name == "kerple_log" or r2 <= 2
    if max(abs(raw1), abs(raw2)) <= 30:
        last = bias(position, 30)[0, 0, -1].flip(0)  # by distance
        assert last[0] == 0
        assert (last.diff() < 0).all()
        assert last.isfinite().all()


@pytest.mark.parametrize(("name", "high"), [("kerple_log", math.inf), ("kerple_power", 2.0)])
def test_clamped_values_are_trained_as_they_are_and_each_forward_pass_stores_the_clamped_ones(name, high):
    """By hand: with a gradient of 1 and a rate of 0.1, a value below the floor starts its step at the floor."""
    position = relpos.encoding(name, 3, HEAD_DIM, clamped=True)
    parameter = position.r2
    copy(parameter.raw, torch.tensor([-0.5, 0.7, 9.0])[:, None, None])
    before = parameter(torch.float32)
    assert before.tolist() == pytest.approx([0.01, 0.7, min(9.0, high)])
    before.sum().backward()
    torch.optim.SGD(position.parameters(), lr=0.1).step()
    stored = parameter.raw.detach().flatten().tolist()
    assert stored == pytest.approx([value - 0.1 for value in (0.01, 0.7, min(9.0, high))])  # the clamp has no gradient
    position.map(4)
    assert parameter.raw[0].item() == pytest.approx(0.01)
    assert parameter.raw.shape == (3, 1, 1)  # a matrix for what decays matrices


@torch.no_grad()
def test_fire_is_finite_where_the_absolute_value_of_c_is_0():
    position = relpos.encoding("fire", 2, HEAD_DIM, absolute=True)
    position.c.assign(torch.zeros(1))
    assert_close(position.map(5)[:, -1], position.map(5)[:, -1:, -1].expand(2, 5))  # no distance is left
    assert position.map(5)[:, -1].isfinite().all()


def slopes(**options):
    return (-relpos.encoding("alibi", head_dim=8, **options).map(2)[:, 1, 0]).tolist()


def test_alibi_slopes_are_those_of_the_paper_and_of_the_official_rule():
    for heads in (1, 2, 3, 12, 16, 20, 64):
        exponents = [-math.log2(slope) for slope in slopes(heads=heads)]
        assert exponents == pytest.approx([8 * h / heads for h in range(1, heads + 1)], abs=1e-6)
        agree = slopes(heads=heads) == slopes(heads=heads, slopes="press")
        assert agree == (heads & (heads - 1) == 0)  # for powers of two
    exponents = [-math.log2(slope) for slope in slopes(heads=12, slopes="press")]
    assert exponents == pytest.approx([1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5], abs=1e-6)  # of 8, then of 16


# Precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", relpos.names())
@torch.no_grad()
def test_half_precision_inputs_meet_float32_tables(name, dtype):
    position = build(name).float()
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
    position = build(name)
    q, k, v = qkv()
    x = hidden()
    double = relpos.scores(q, k, position, hidden=x)
    assert double.dtype == relpos.attention(q, k, v, position, hidden=x).dtype == torch.float64
    single = relpos.scores(q.float(), k.float(), build(name).float(), hidden=x.float())
    error = (single.double() - double)[:, :, SEEN].abs().max()
    assert 1e-9 < error < 1e-4  # float32 errs by its rounding and no more; float64 is not float32 in disguise
