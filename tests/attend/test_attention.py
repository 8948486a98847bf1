"""The reference itself, against a slow computation written from the definition, one number at a time."""

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import relpos


def mixed(x):
    """The hash of the dropout, written from its description: arithmetic modulo 2^32."""
    x %= 2**32
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) % 2**32
    x = ((x ^ (x >> 15)) * 0x735A2D97) % 2**32
    return x ^ (x >> 15)


def is_kept(seed, share, head, i, j):
    row = mixed(mixed(mixed(mixed(seed % 2**32) + (seed >> 32)) + head) + i)
    return mixed(row + mixed(j + 0x9E3779B9)) >> 8 >= round(share * 2**24)


def by_hand(q, k, v, slopes, o):
    """Attention with ALiBi and the options o, with loops, in float64: the output and the log-sum-exp."""
    batch, heads, queries, head_dim = q.shape
    key_heads, keys = k.shape[1:3]
    out, lse = np.zeros((batch, heads, queries, v.shape[3])), np.full((batch, heads, queries), -math.inf)
    for b, h, row in np.ndindex(batch, heads, queries):
        g, i = h * key_heads // heads, o["start"] + row
        where = [i - j for j in range(keys)]
        if o["positions"] is not None:
            own = o["positions"][b % len(o["positions"])].tolist()
            where = [own[i] - x for x in own]
        seen = [
            j
            for j in range(keys)
            if (not o["causal"] or j <= i)
            and (o["window"] is None or i - o["window"][0] <= j <= i + o["window"][1])
            and (o["documents"] is None or o["documents"][b, i] == o["documents"][b, j])
            and (o["padding"] is None or o["padding"][b, j])
            and (o["mask"] is None or o["mask"][b, h, row, j])
        ]
        logits = {}
        for j in seen:
            score = (head_dim**-0.5 if o["scale"] is None else o["scale"]) * float(q[b, h, row] @ k[b, g, j])
            if o["softcap"] is not None:
                score = o["softcap"] * math.tanh(score / o["softcap"])
            logits[j] = score - slopes[h] * abs(where[j])
        exponentials = [math.exp(x) for x in logits.values()]
        if o["sinks"] is not None:
            exponentials.append(math.exp(o["sinks"][h]))
        if exponentials:
            lse[b, h, row] = math.log(sum(exponentials))
        for j, logit in logits.items():
            if not o["dropout"] or is_kept(o["seed"], o["dropout"], b * heads + h, i, j):
                out[b, h, row] += math.exp(logit) / sum(exponentials) / (1 - o["dropout"]) * v[b, g, j].numpy()
    return torch.from_numpy(out), torch.from_numpy(lse)


WINDOWS = st.integers(0, 4) | st.sampled_from([sys.maxsize, 2**31 - 1, 2**31, 2**63, 2**64, 2**64 + 1]) | st.integers(0)


@st.composite
def calls(draw):
    """Shapes and options of attention, all of them in combination."""
    batch, key_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    keys, queries = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    causal, anywhere = draw(st.booleans()), draw(st.booleans())
    among = not anywhere or queries > keys
    start = keys - queries if among and queries <= keys else draw(st.integers(0, 12))
    among = start + queries <= keys

    def maybe(strategy, allowed=True):
        return draw(strategy) if allowed and draw(st.booleans()) else None

    def flags(*shape):
        return st.lists(st.booleans(), min_size=math.prod(shape), max_size=math.prod(shape)).map(
            lambda drawn: torch.tensor(drawn).view(shape)
        )

    cuts = maybe(flags(batch, keys), among)
    rows = draw(st.sampled_from([1, batch]))
    steps = maybe(st.lists(st.integers(-2, 3), min_size=rows * keys, max_size=rows * keys), among)
    options = {
        "causal": causal,
        "window": maybe(st.tuples(WINDOWS, WINDOWS)),
        "start": start,
        "positions": None if steps is None else torch.tensor(steps).view(rows, keys).cumsum(1),
        "documents": None if cuts is None else cuts.long().cumsum(1),
        "padding": maybe(flags(batch, keys)),
        "mask": maybe(flags(batch, key_heads * group, queries, keys)),
        "sinks": maybe(st.lists(st.floats(-2, 2), min_size=key_heads * group, max_size=key_heads * group)),
        "softcap": maybe(st.sampled_from([0.5, 2.0, 50.0])),
        "dropout": draw(st.sampled_from([0.0, 0.3])),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "scale": draw(st.sampled_from([None, 0.3, 1.0])),
    }
    return (
        batch,
        key_heads * group,
        key_heads,
        queries,
        keys,
        draw(st.integers(1, 5)),
        draw(st.integers(1, 5)),
    ), options


@settings(max_examples=150, deadline=None)
@given(calls(), st.sampled_from(["reference", "chunks"]))
def test_attention_is_its_definition(call, backend):
    (batch, heads, key_heads, queries, keys, head_dim, value_dim), options = call
    q, k, v = (
        torch.randn(batch, h, n, d, dtype=torch.float64)
        for h, n, d in ((heads, queries, head_dim), (key_heads, keys, head_dim), (key_heads, keys, value_dim))
    )
    position = relpos.encoding("alibi", heads=heads, head_dim=head_dim)
    expected = by_hand(q, k, v, [2.0 ** (-8 * h / heads) for h in range(1, heads + 1)], options)
    if options["sinks"] is not None:
        options["sinks"] = torch.tensor(options["sinks"], dtype=torch.float64)
    ours = relpos.attention(q, k, v, position, **options, return_lse=True, backend=backend)
    for mine, by in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, by, rtol=0.0, atol=1e-10)


@settings(max_examples=60, deadline=None)
@given(WINDOWS | st.tuples(WINDOWS, WINDOWS), st.booleans(), st.sampled_from([1, 6, 70]), st.sampled_from([None, 3]))
def test_a_window_of_any_integer_is_a_mask(window, causal, queries, start):
    """In every backend, in mass and in scores; wider than the sequence, it hides nothing."""
    keys = 70
    start = start if queries < keys else None
    first = keys - queries if start is None else start
    if not causal and start is None and queries < keys:
        start = first
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, queries, 4), torch.randn(1, 2, keys, 4), torch.randn(1, 2, keys, 4)
    position = relpos.encoding("alibi", heads=2, head_dim=4)
    before, after = (window, window) if isinstance(window, int) else window
    rows = range(first, first + queries)
    seen = torch.tensor([[i - before <= j <= i + after and (j <= i or not causal) for j in range(keys)] for i in rows])
    options = {"causal": causal, "start": start}
    scores = relpos.scores(q, k, position, causal=False, start=first).masked_fill(~seen, -torch.inf)
    assert torch.equal(relpos.scores(q, k, position, window=window, **options), scores)
    weights = scores.softmax(-1).nan_to_num()  # a row that sees nothing
    for backend in ("native", "chunks", "reference"):
        out = relpos.attention(q, k, v, position, window=window, backend=backend, **options)
        torch.testing.assert_close(out, weights @ v, rtol=1e-5, atol=1e-6)
    for backend in ("native", "chunks"):
        mass = relpos.mass(q, k, position, window=window, backend=backend, **options)
        share = (weights.sum(-1) > 0).float().sum(-1).clamp(min=1)
        torch.testing.assert_close(mass.first_key, weights[..., 0].sum(-1) / share, rtol=1e-5, atol=1e-6)


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
