"""The reference itself, against a slow computation written from the definition, one number at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import relpos


def by_hand(q, k, v, bias, causal, documents, padding, scale):
    """softmax(scale·q·k + bias)·v with loops, in float64; a row that sees nothing gives 0."""
    batch, heads, queries, _ = q.shape
    key_heads, keys = k.shape[1:3]
    out = np.zeros(q.shape)
    for b in range(batch):
        for h in range(heads):
            g = h * key_heads // heads
            for row in range(queries):
                i = keys - queries + row
                seen = [
                    j
                    for j in range(keys)
                    if (not causal or j <= i)
                    and (documents is None or documents[b, i] == documents[b, j])
                    and (padding is None or padding[b, j])
                ]
                if not seen:
                    continue
                logits = [scale * float(q[b, h, row] @ k[b, g, j]) + bias[h][i][j] for j in seen]
                top = max(logits)
                weights = [math.exp(x - top) for x in logits]
                for j, weight in zip(seen, weights, strict=True):
                    out[b, h, row] += weight / sum(weights) * v[b, g, j]
    return out


@st.composite
def calls(draw):
    batch, key_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    keys = draw(st.integers(1, 9))
    queries = draw(st.integers(1, keys))
    documents = padding = None
    if draw(st.booleans()):
        cuts = draw(st.lists(st.booleans(), min_size=batch * keys, max_size=batch * keys))
        documents = torch.tensor(cuts).view(batch, keys).long().cumsum(1)
    if draw(st.booleans()):
        padding = torch.tensor(draw(st.lists(st.booleans(), min_size=batch * keys, max_size=batch * keys)))
        padding = padding.view(batch, keys)
    return {
        "shape": (batch, key_heads * group, key_heads, queries, keys, draw(st.integers(1, 5))),
        "causal": draw(st.booleans()),
        "documents": documents,
        "padding": padding,
        "scale": draw(st.sampled_from([None, 0.3, 1.0])),
        "seed": draw(st.integers(0, 2**16)),
    }


@settings(max_examples=60, deadline=None)
@given(calls())
def test_attention_is_its_definition(call):
    batch, heads, key_heads, queries, keys, head_dim = call["shape"]
    torch.manual_seed(call["seed"])
    q = torch.randn(batch, heads, queries, head_dim, dtype=torch.float64)
    k, v = torch.randn(2, batch, key_heads, keys, head_dim, dtype=torch.float64)
    position = relpos.encoding("alibi", heads=heads, head_dim=head_dim)
    options = {key: call[key] for key in ("causal", "documents", "padding", "scale")}
    out = relpos.attention(q, k, v, position, **options)
    bias = [
        [[-(2.0 ** (-8 * h / heads)) * abs(i - j) for j in range(keys)] for i in range(keys)]
        for h in range(1, heads + 1)
    ]
    scale = call["scale"] or head_dim**-0.5
    arrays = (x.numpy() for x in (q, k, v))
    expected = by_hand(*arrays, bias, call["causal"], call["documents"], call["padding"], scale)
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=1e-12)


def test_without_a_position_it_is_pytorchs_own():
    q, k, v = torch.randn(3, 2, 3, 17, 8, dtype=torch.float64)
    for causal in (True, False):
        theirs = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        torch.testing.assert_close(relpos.attention(q, k, v, causal=causal), theirs, rtol=0, atol=1e-13)


def test_scores_are_the_logits_of_attention():
    q, k, v = torch.randn(3, 1, 4, 9, 8, dtype=torch.float64)
    position = relpos.encoding("rope", heads=4, head_dim=8)
    weights = relpos.scores(q, k, position).softmax(-1)
    torch.testing.assert_close(weights @ v, relpos.attention(q, k, v, position), rtol=0, atol=1e-13)


def test_a_row_that_sees_nothing_sends_back_no_nan():
    q, k, v = torch.randn(3, 1, 2, 4, 8, requires_grad=True).unbind(0)
    for x in (q, k, v):
        x.retain_grad()
    padding = torch.tensor([[False, False, True, True]])
    relpos.attention(q, k, v, padding=padding).sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert q.grad[:, :, :2].abs().max() == 0


def test_autocast_changes_nothing():
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    x = torch.randn(1, 6, 16)
    position = relpos.encoding("cable", heads=2, head_dim=8)
    plain = relpos.attention(q, k, v, position, hidden=x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = relpos.attention(q, k, v, position, hidden=x)
    assert torch.equal(plain, inside)


@pytest.mark.parametrize("name", ["alibi", "kerple_log", "sandwich", "fire"])
def test_far_distances_stay_exact_for_half_precision_queries(name):
    """bfloat16 counts exactly only to 256; distances must not."""
    torch.manual_seed(0)
    position = relpos.encoding(name, heads=2, head_dim=8)
    q = torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16)
    k = torch.zeros(1, 2, 1001, 8, dtype=torch.bfloat16)
    torch.testing.assert_close(relpos.scores(q, k, position)[0, :, 0], position.map(1001)[:, -1])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "backend"), [("cable", "aot_eager"), pytest.param("kerple_log", "inductor", marks=pytest.mark.slow)]
)
def test_it_compiles_in_one_graph_with_its_gradients(name, backend):
    position = relpos.encoding(name, heads=2, head_dim=8)
    hidden = torch.randn(1, 70, 16)
    q, k, v = (torch.randn(1, 2, 70, 8, requires_grad=True) for _ in range(3))

    def run(q, k, v):
        return relpos.attention(q, k, v, position, hidden=hidden)

    wanted = (q, k, v, *position.parameters())
    graph = torch.compile(run, fullgraph=True, backend=backend)
    plain, compiled = (torch.autograd.grad(f(q, k, v).sin().sum(), wanted) for f in (run, graph))
    for ours, theirs in zip(compiled, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_it_exports():
    position = relpos.encoding("kerple_log", heads=2, head_dim=8)
    q, k, v = torch.randn(3, 1, 2, 6, 8)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.position = position

        def forward(self, q, k, v):
            return relpos.attention(q, k, v, self.position)

    exported = torch.export.export(Layer(), (q, k, v)).module()
    torch.testing.assert_close(exported(q, k, v), Layer()(q, k, v))
