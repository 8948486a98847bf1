"""Rotation, embedding, precision and start values, each against its formula in the slowest and plainest way."""

import cmath
import math

import pytest
import torch
from plain import CLOSE, HEAD_DIM, HEADS, LENGTH, SEEN, WIDTH, build, hidden, normal, qkv
from torch.testing import assert_close

import relpos
from relpos.forms.call import Call
from relpos.forms.rotation import SCALINGS

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
    position = build("learned", length=20)
    x = hidden()
    assert_close(position.embed(x).detach(), x + position.weight[:LENGTH].detach(), **CLOSE)
    assert_close(position.embed(x, start=6).detach(), x + position.weight[6:].detach(), **CLOSE)
    documents = torch.tensor([[4] * 5 + [2] * 9, [1] * 14])
    rows = torch.tensor([[*range(5), *range(9)], [*range(14)]])
    assert_close(position.embed(x, documents=documents).detach(), x + position.weight[rows].detach(), **CLOSE)


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
    assert relpos.scores(q, k, position, hidden=x).dtype == torch.float64
    assert relpos.attention(q, k, v, position, hidden=x).dtype == torch.float64
    single = relpos.scores(q.float(), k.float(), build(name).float(), hidden=x.float())
    double = relpos.scores(q, k, position, hidden=x)
    error = (single.double() - double)[:, :, SEEN].abs().max()
    assert 1e-9 < error < 1e-4  # float32 errs by its rounding and no more; float64 is not float32 in disguise


# Start values


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
    assert spread(relpos.encoding("learned", 4, 8).weight) == pytest.approx([0, 0.02], abs=0.001)
    for gate in (relpos.encoding("cable", 8, 64).steps, relpos.encoding("cable", 8, 64).weights):
        assert spread(gate.weight) == pytest.approx([0, 0.02], abs=0.002)
        assert (gate.bias == 0).all()
    assert (relpos.encoding("forgetting", 8, 64).gate.bias == 0).all()
    assert spread(relpos.encoding("forgetting", 8, 64).gate.weight) == pytest.approx([0, 0.02], abs=0.002)
    assert (relpos.encoding("cope", 4, 8).table == 0).all()
