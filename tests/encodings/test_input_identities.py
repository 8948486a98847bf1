"""The biases that come from the input or the scores, each against its formula in the slowest and plainest way."""

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
    WIDTH,
    affine,
    bias,
    build,
    copy,
    hidden,
    qkv,
    softplus,
    unsoftplus,
)
from torch.nn import functional as F
from torch.testing import assert_close

import relpos

# CABLE


def running(linear, x, step):
    """S = cumsum(step(w·x + b)) by plain sums: heads × length."""
    steps = [[max(z, 0.0) if step == "relu" else softplus(z) for z in row] for row in affine(linear, x)]
    return [[math.fsum(row[: t + 1]) for t in range(len(row))] for row in steps]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("step", ["relu", "softplus"])
@pytest.mark.parametrize("name", ["cable", "cable_nw", "kcable"])
def test_cable_is_its_formula(name, step, causal):
    position, x = build(name, step=step), hidden()
    written = bias(position, causal=causal, x=x)
    for b in range(len(x)):
        S = running(position.steps, x[b], step)
        G = [[softplus(z) for z in row] for row in affine(position.weights, x[b])] if name == "cable" else None
        for h in range(HEADS):
            for i in range(LENGTH):
                for j in range(i + 1 if causal else LENGTH):
                    gained = abs(S[h][i] - S[h][j])
                    expected = -math.log(1 + gained**2) if name == "kcable" else -gained * (G[h][i] if G else 1)
                    assert written[b, h, i, j].item() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("name", ["cable", "cable_nw", "kcable", "forgetting"])
def test_learned_distances_are_0_on_the_diagonal_and_never_positive(name):
    position = build(name)
    for causal in (True, False) if position.bidirectional else (True,):
        written = bias(position, causal=causal, x=hidden())
        assert (written.diagonal(dim1=2, dim2=3) == 0).all()
        assert (written <= 0).all()
        assert written[:, :, -1, 0].max() < 0


@pytest.mark.parametrize("name", ["cable_nw", "forgetting"])
def test_learned_distances_without_a_weight_add_up(name):
    written = bias(build(name), x=hidden())
    for i, j, k in ((9, 4, 0), (13, 12, 3), (7, 7, 2), (13, 6, 6)):
        assert_close(written[:, :, i, j] + written[:, :, j, k], written[:, :, i, k], **CLOSE)


def test_weighted_distances_do_not_add_up():
    written = bias(build("cable"), x=hidden())
    assert (written[:, :, 9, 4] + written[:, :, 4, 0] - written[:, :, 9, 0]).abs().max() > 1e-2


def test_cable_with_steps_of_1_and_a_constant_weight_is_alibi():
    position, alibi = build("cable"), relpos.encoding("alibi", HEADS, HEAD_DIM)
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
    position, x = build(name), hidden()
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
    position, x = build("forgetting"), hidden()
    written = bias(position, x=x)
    for b in range(len(x)):
        z = affine(position.gate, x[b])
        for h in range(HEADS):
            for i in range(LENGTH):
                for j in range(i + 1):
                    expected = math.fsum(math.log(1 / (1 + math.exp(-z[h][t]))) for t in range(j + 1, i + 1))
                    assert written[b, h, i, j].item() == pytest.approx(expected, abs=1e-10)


def test_a_constant_forget_gate_is_alibi():
    position, alibi = build("forgetting"), relpos.encoding("alibi", HEADS, HEAD_DIM)
    copy(position.gate.weight, torch.zeros(HEADS, WIDTH))
    biases = [-unsoftplus(m) for m in alibi.slopes]  # log σ(b) = −m
    copy(position.gate.bias, torch.tensor(biases, dtype=torch.float64))
    assert_close(bias(position, x=hidden()), bias(alibi).expand(2, -1, -1, -1), **CLOSE)


def test_a_forget_gate_that_stays_open_is_no_encoding():
    position = build("forgetting")
    copy(position.gate.weight, torch.zeros(HEADS, WIDTH))
    copy(position.gate.bias, [40.0] * HEADS)  # log σ(40) = −4e-18
    q, k, v = qkv()
    assert_close(relpos.attention(q, k, v, position, hidden=hidden()), relpos.attention(q, k, v), **CLOSE)


def test_forgetting_is_softplus_cable_without_weight_and_the_sign_turned():
    forgetting, cable = build("forgetting"), build("cable_nw", step="softplus")
    copy(cable.steps.weight, -forgetting.gate.weight)
    copy(cable.steps.bias, -forgetting.gate.bias)
    assert_close(bias(forgetting, x=hidden()), bias(cable, x=hidden()), **CLOSE)


# CoPE


@pytest.mark.parametrize("scaled", [False, True])
def test_cope_is_its_formula(scaled):
    position = build("cope", npos=5, scaled=scaled)
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
    position = build(name, base=base)
    for parameter in position.second.parameters():
        parameter.zero_()
    q, k, _ = qkv()
    x = hidden()
    for causal in (True, False) if position.bidirectional else (True,):
        expected = relpos.scores(q, k, position.base, hidden=x, causal=causal)
        assert_close(relpos.scores(q, k, position, hidden=x, causal=causal), expected, **CLOSE)
    if base in ("alibi", "kerple_log", "cable", "fire"):  # which do something at this length
        assert (expected - relpos.scores(q, k, causal=causal))[:, :, SEEN].abs().max() > 1e-3


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
    position = build("dapev2", base=base)
    q, k, _ = qkv()
    before = relpos.scores(q, k, position)
    for later in range(1, LENGTH):
        changed = k.clone()
        changed[:, :, later] += 5.0
        after = relpos.scores(q, changed, position)
        assert torch.equal(after[:, :, :later], before[:, :, :later])
        assert (after[:, :, later, : later + 1] - before[:, :, later, : later + 1]).abs().max() > 1e-2
