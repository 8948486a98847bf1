"""Every encoding against its formula, computed entry by entry in plain Python and float64."""

import cmath
import math

import pytest
import torch
from plain import (
    CLOSE,
    HEAD_DIM,
    HEADS,
    LENGTH,
    SCORE,
    SEEN,
    STATIC,
    WIDTH,
    affine,
    bias,
    build,
    hidden,
    normal,
    qkv,
    softplus,
)
from torch.nn import functional as F
from torch.testing import assert_close

import relpos

# The bias of head h, query i and key j. A formula receives the encoding and the layer's input x (length, width).


def alibi(position, x):
    return lambda h, i, j: -(2 ** (-8 * (h + 1) / HEADS)) * abs(i - j)


def kerple(position, x):
    r1, r2 = position.r1(torch.float64).tolist(), position.r2(torch.float64).tolist()
    if isinstance(position, relpos.encodings.KerpleLog):
        return lambda h, i, j: -r1[h] * math.log(1 + r2[h] * abs(i - j))
    return lambda h, i, j: -r1[h] * abs(i - j) ** r2[h]


def clipped(position, x):
    table, limit = position.table.tolist(), position.limit  # distance −limit comes first
    return lambda h, i, j: table[h][limit + max(-limit, min(limit, i - j))]


def window(position, x):
    return lambda h, i, j: 0.0 if abs(i - j) < position.size else -math.inf


def sandwich(position, x):
    d = position.dim

    def entry(h, i, j):
        waves = sum(math.cos((i - j) / 10000 ** (2 * k / d)) for k in range(1, d // 2 + 1))
        return (waves - d / 2) * HEADS / (8 * (h + 1))

    return entry


def fire(position, x):
    if position.options["absolute"]:
        c, threshold, least = abs(position.c.raw.item()), abs(512 * position.stretch.raw.item()), 1e-6
    else:
        c, least = position.c(torch.float64).item(), 0.0
        threshold = position.length * position.stretch(torch.float64).item()
    inner = list(zip(position.inner.weight[:, 0].tolist(), position.inner.bias.tolist(), strict=True))
    outer, offset = position.outer.weight.tolist(), position.outer.bias.tolist()

    def entry(h, i, j):
        r = math.log(c * abs(i - j) + 1) / (math.log(c * max(i, j, threshold) + 1) + least)
        units = [max(a * r + b, position.leak * (a * r + b)) for a, b in inner]
        return sum(w * u for w, u in zip(outer[h], units, strict=True)) + offset[h]

    return entry


def cable(position, x):
    rectify = softplus if position.step == "softplus" else lambda z: max(z, 0.0)
    steps = [[rectify(z) for z in row] for row in affine(position.steps, x)]
    total = [[math.fsum(row[: t + 1]) for t in range(len(row))] for row in steps]
    weighted = isinstance(position, relpos.encodings.Cable) or position.options.get("weighted")
    weight = (
        [[softplus(z) for z in row] for row in affine(position.weights, x)] if weighted else [[1.0] * len(x)] * HEADS
    )
    if isinstance(position, relpos.encodings.KernelCable):
        return lambda h, i, j: -weight[h][i] * math.log(1 + (total[h][i] - total[h][j]) ** 2)
    return lambda h, i, j: -weight[h][i] * abs(total[h][i] - total[h][j])


def forgetting(position, x):
    z = affine(position.gate, x)
    return lambda h, i, j: math.fsum(math.log(1 / (1 + math.exp(-z[h][t]))) for t in range(j + 1, i + 1))


BIASES = [
    ("alibi", {}, alibi),
    ("kerple_log", {}, kerple),
    ("kerple_power", {}, kerple),
    ("kerple_log", {"clamped": True}, kerple),
    ("kerple_power", {"clamped": True}, kerple),
    ("clipped", {"limit": 5}, clipped),
    ("clipped", {"limit": 5, "divisor": "width"}, clipped),
    ("window", {"size": 4}, window),
    ("sandwich", {}, sandwich),
    ("sandwich", {"dim": 12}, sandwich),
    *[("fire", {"length": 6, "units": 7, "leak": leak}, fire) for leak in (0, 0.01, 0.4, 1)],
    *[("fire", {"length": 6, "units": 7, "leak": leak, "symmetric": True}, fire) for leak in (0, 0.4)],
    ("fire", {"length": 512, "units": 7, "absolute": True, "symmetric": True}, fire),
    ("kcable", {"weighted": True}, cable),
    *[(name, {"step": step}, cable) for name in ("cable", "cable_nw", "kcable") for step in ("relu", "softplus")],
    ("forgetting", {}, forgetting),
]


def entries(formula, causal=True):
    """Its values for all heads, queries and keys: (heads, length, length), −inf in the future if causal."""
    values = [
        [[-math.inf if causal and j > i else formula(h, i, j) for j in range(LENGTH)] for i in range(LENGTH)]
        for h in range(HEADS)
    ]
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("name", "options", "formula"), BIASES)
def test_a_bias_is_its_formula(name, options, formula):
    position, x = build(name, **options), hidden()
    if name == "fire":
        position.stretch.assign(torch.tensor([1.4], dtype=torch.float64))  # it counts too
    if options.get("absolute"):
        position.c.assign(torch.tensor([-0.7], dtype=torch.float64))
        position.stretch.assign(torch.tensor([-8 / 512], dtype=torch.float64))  # a threshold within the window
    for causal in (True, False) if position.bidirectional else (True,):
        written = bias(position, causal=causal, x=x)
        for row, expected in enumerate([entries(formula(position, each), causal) for each in x]):
            assert_close(written[row], expected, **CLOSE)


# The score of head h, query i and key j, from lists Q, K of the vectors of a head.


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(HEAD_DIM)


def pairs_of(x, layout):
    """The pairs of x (head_dim,) as complex numbers."""
    half = len(x) // 2
    return [complex(x[n], x[n + half]) if layout == "half" else complex(x[2 * n], x[2 * n + 1]) for n in range(half)]


def rotary(position, h, Q, K, i, j):
    xpos = isinstance(position, relpos.encodings.Xpos)
    layout = "interleaved" if xpos else position.layout
    total = 0.0
    for n, (a, b) in enumerate(zip(pairs_of(Q[i], layout), pairs_of(K[j], layout), strict=True)):
        zeta = (2 * n + 0.4 * HEAD_DIM) / (1.4 * HEAD_DIM) if xpos else 1.0
        turned = (a * b.conjugate() * cmath.exp(1j * (i - j) * 10000 ** (-2 * n / HEAD_DIM))).real
        total += turned * zeta ** ((i - j) / position.scale_base if xpos else 0)
    return total / math.sqrt(HEAD_DIM)


def cope(position, h, Q, K, i, j):
    scale, e = 1.0 if position.scaled else math.sqrt(HEAD_DIM), position.table.tolist()
    p = min(math.fsum(1 / (1 + math.exp(-dot(Q[i], K[t]) * scale)) for t in range(j, i + 1)), position.npos - 1)
    w = p - math.floor(p)
    row = [(1 - w) * x + w * y for x, y in zip(e[math.floor(p)], e[math.ceil(p)], strict=True)]
    return dot(Q[i], K[j]) + dot(Q[i], row) * math.sqrt(HEAD_DIM)


def temperature(position, h, Q, K, i, j):
    growth = {
        "llama4": lambda i: math.log(1 + (i + 1) // 3),
        "ministral3": lambda i: math.log(1 + i // 3),
        "inkling": lambda i: math.log(max((i + 1) / 3, 1)),
    }
    return dot(Q[i], K[j]) * (1 + 0.1 * growth[position.rule](i))


def clipped_over_width(position, h, Q, K, i, j):
    products = sum(a * b for a, b in zip(Q[i], K[j], strict=True))
    return products / math.sqrt(WIDTH) + clipped(position, None)(h, i, j)


def ssmax(position, h, Q, K, i, j):
    return dot(Q[i], K[j]) * position.s[h].item() * math.log(i + 1)


SCORES = [
    ("rope", {"layout": "half"}, rotary),
    ("rope", {"layout": "interleaved"}, rotary),
    ("xpos", {"scale_base": 16.0}, rotary),
    ("cope", {"npos": 5}, cope),
    ("cope", {"npos": 5, "scaled": False}, cope),
    *[("temperature", {"rule": rule, "length": 3}, temperature) for rule in ("llama4", "ministral3", "inkling")],
    ("ssmax", {}, ssmax),
    ("clipped", {"limit": 5, "divisor": "width"}, clipped_over_width),
]


@pytest.mark.parametrize(("name", "options", "formula"), SCORES)
def test_scores_are_their_formula(name, options, formula):
    position = build(name, **options)
    q, k, _ = qkv(batch=1)
    lists = [(q[0, h].tolist(), k[0, h].tolist()) for h in range(HEADS)]
    expected = entries(lambda h, i, j: formula(position, h, *lists[h], i, j))
    assert_close(relpos.scores(q, k, position)[0].detach(), expected, **CLOSE)


@torch.no_grad()
def test_dape_is_its_formula():
    position = build("dape", base="alibi")
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
    position = build("dapev2", base="alibi", units=5)
    q, k, _ = qkv(batch=1)
    A = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(HEAD_DIM)
    B = bias(relpos.encoding("alibi", HEADS, HEAD_DIM))
    written = relpos.scores(q, k, position)[0]
    layers = [(layer.weight[:, :, 0], layer.bias) for layer in (position.first, position.second)]  # (out, in, 3)
    for i in range(LENGTH):  # a row by itself knows nothing of the keys after it
        row = torch.cat([A[0, :, i, : i + 1], B[0, :, i, : i + 1]])  # (2·heads, i + 1)
        for number, (W, b) in enumerate(layers):
            if number:
                row = torch.where(row > 0, row, 0.01 * row)
            columns = [
                b + sum(W[:, :, t] @ row[:, j + t - 1] for t in range(3) if 0 <= j + t - 1 <= i) for j in range(i + 1)
            ]
            row = torch.stack(columns, dim=1)
        expected = A[0, :, i, : i + 1] + B[0, :, i, : i + 1] + row
        assert_close(written[:, i, : i + 1], expected, **CLOSE)


@pytest.mark.parametrize("base", SCORE)
@pytest.mark.parametrize("name", ["dape", "dapev2"])
@torch.no_grad()
def test_dape_with_a_zero_network_is_its_base(name, base):
    position = build(name, base=base)
    for parameter in position.second.parameters():
        parameter.zero_()
    q, k, _ = qkv()
    x = hidden()
    for causal in (True, False) if position.bidirectional else (True,):
        expected = relpos.scores(q, k, position.base, hidden=x, causal=causal)
        assert_close(relpos.scores(q, k, position, hidden=x, causal=causal), expected, **CLOSE)


@torch.no_grad()
def test_symmetric_fire_knows_given_positions_and_where_the_queries_stand():
    position = build("fire", length=6, units=7, symmetric=True)
    formula = fire(position, None)
    zero = torch.zeros(2, HEADS, LENGTH, HEAD_DIM, dtype=torch.float64)
    positions = torch.tensor([[*range(5), *range(20, 29)], [*range(0, 28, 2)]])
    written = relpos.scores(zero, zero, position, causal=False, positions=positions)
    for row, p in enumerate(positions.tolist()):
        assert_close(written[row], entries(lambda h, i, j, p=p: formula(h, p[i], p[j]), causal=False), **CLOSE)
    beyond = relpos.scores(zero, zero[:, :, :5], position, causal=False, start=3)  # queries 3 … 16, keys 0 … 4
    assert_close(beyond[0], entries(lambda h, i, j: formula(h, i + 3, j), causal=False)[:, :, :5], **CLOSE)


def test_temperature_reads_given_positions():
    q, k, _ = qkv()
    positions = torch.tensor([[0, 1, 5, 6, 7, 100, 101, 102, 103, 104, 105, 106, 107, 9000]])
    factor = [1 + 0.1 * math.log(1 + (i + 1) // 3) for i in positions[0].tolist()]
    scores = relpos.scores(q, k, build("temperature", length=3), positions=positions)
    assert_close(scores, relpos.scores(q, k) * torch.tensor(factor, dtype=torch.float64)[:, None], **CLOSE)


@pytest.mark.parametrize("amplitude", [1.0, 0.1])
def test_sinusoidal_adds_its_waves_to_each_token(amplitude):
    position, x = relpos.encoding("sinusoidal", HEADS, HEAD_DIM, amplitude=amplitude), hidden()
    for start in (0, 300):
        angles = [[(start + n) / 10000 ** (2 * (d // 2) / WIDTH) for d in range(WIDTH)] for n in range(LENGTH)]
        waves = [[math.cos(angle) if d % 2 else math.sin(angle) for d, angle in enumerate(row)] for row in angles]
        expected = amplitude * torch.tensor(waves, dtype=torch.float64)
        assert_close(position.embed(x, start=start) - x, expected.expand(2, -1, -1), **CLOSE)


def test_learned_adds_its_row_to_each_token():
    position, x = build("learned", length=20), hidden()
    documents = torch.tensor([[4] * 5 + [2] * 9, [1] * 14])
    rows = torch.tensor([[*range(5), *range(9)], [*range(14)]])
    for arguments, expected in (({}, rows[1]), ({"start": 6}, rows[1] + 6), ({"documents": documents}, rows)):
        assert_close(position.embed(x, **arguments).detach(), x + position.weight[expected].detach(), **CLOSE)


# What holds for many encodings


@pytest.mark.parametrize("name", STATIC)
def test_a_longer_map_only_adds_rows_and_columns(name):
    position = build(name, length=20) if name == "fire" else build(name)
    for causal in (True, False) if position.bidirectional else (True,):
        longer, shorter = position.map(40, causal=causal)[:, :30, :30], position.map(30, causal=causal)
        # A power of a vector and of its tail, which takes another path in the CPU, differ in float32's last place.
        assert_close(longer, shorter, rtol=2.5e-7, atol=0.0)


@pytest.mark.parametrize("name", STATIC)
@torch.no_grad()
def test_a_static_bias_is_added_after_the_scaling_and_the_same_for_any_input(name):
    position = build(name)
    fixed = bias(position)
    for seed, scale in ((10, 0.1), (20, 2.0)):
        q, k = 3 * normal(2, HEADS, LENGTH, HEAD_DIM, seed=seed), normal(2, HEADS, LENGTH, HEAD_DIM, seed=seed + 1)
        written = relpos.scores(q, k, position, hidden=normal(2, LENGTH, WIDTH, seed=seed + 2), scale=scale)
        assert_close(written, (scale * (q @ k.mT) + fixed).masked_fill(~SEEN, -torch.inf), **CLOSE)


@pytest.mark.parametrize("name", [*SCORE, "nope"])
def test_a_map_is_the_mask_that_makes_pytorchs_attention_the_same(name):
    position = build(name)
    q, k, v = qkv()
    for causal in (True, False) if position.bidirectional else (True,):
        x = hidden() if position.needs_hidden else None
        scored = {"q": q, "k": k} if position.needs_scores else {}
        mask = position.map(LENGTH, hidden=x, causal=causal, **scored)
        for scale in (None, 0.7) if name == "nope" else (None,):
            expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.double(), scale=scale)
            out = relpos.attention(q, k, v, position, hidden=x, causal=causal, scale=scale).detach()
            # A map of nothing but a length is float32.
            tolerance = CLOSE if mask.dtype == torch.float64 else {"rtol": 0.0, "atol": 1e-5}
            assert_close(out, expected, **tolerance)
            if name == "nope":
                assert_close(relpos.attention(q, k, v, causal=causal, scale=scale), expected, **CLOSE)


def test_xpos_scores_of_equal_tokens_depend_on_the_distance_alone():
    q, k = (normal(1, HEADS, 1, HEAD_DIM, seed=seed).expand(-1, -1, 600, -1) for seed in (0, 1))
    written = relpos.scores(q, k, relpos.encoding("xpos", HEADS, HEAD_DIM))
    assert_close(written[:, :, 1:, 1:], written[:, :, :-1, :-1], rtol=0.0, atol=1e-9)  # angles of 600


def test_rope_may_count_positions_in_bfloat16_which_has_eight_significant_bits():
    """Rounded here to 8 bits by integer arithmetic, ties to even, and rotated by complex numbers."""

    def rounded(position: int) -> int:
        unit = 2 ** max(position.bit_length() - 8, 0)
        low, rest = divmod(position, unit)
        return unit * (low + (2 * rest > unit or (2 * rest == unit and low % 2 == 1)))

    length, position = 1024, relpos.encoding("rope", heads=1, head_dim=4, position_dtype="bfloat16")
    positions = [rounded(i) for i in range(length)]
    assert len(set(positions)) == 513  # as seen with rotary-embedding-torch 0.8.9 under autocast
    q, k = torch.randn(2, 1, 1, length, 4)
    angle = torch.tensor(positions, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.01], dtype=torch.float64)
    turned_q, turned_k = (
        torch.complex(x[..., :2].double(), x[..., 2:].double()) * torch.polar(torch.ones_like(angle), angle)
        for x in (q, k)
    )
    scores = (turned_q @ turned_k.mH).real / 2
    assert_close(relpos.scores(q, k, position).tril(), scores.float().tril(), atol=2e-4, rtol=1e-4)
