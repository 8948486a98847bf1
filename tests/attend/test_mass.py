"""The attention of each head by distance, against weights that are materialised and added up one by one."""

import math

import pytest
import torch

import relpos
from relpos.forms.call import document_ends

HEADS, HEAD_DIM, LENGTH = 4, 8, 150
NAMES = [None, "alibi", "kerple_log", "cable", "fire", "rope", "cope", "sum"]


def inputs(queries=LENGTH, keys=LENGTH, batch=2):
    return torch.randn(batch, HEADS, queries, HEAD_DIM), torch.randn(batch, 2, keys, HEAD_DIM)


def build(name, keys=LENGTH, batch=2):
    if name is None:
        return None, {}
    position = relpos.encoding(name, heads=HEADS, head_dim=HEAD_DIM)
    return position, {"hidden": torch.randn(batch, keys, HEADS * HEAD_DIM)} if position.needs_hidden else {}


def by_hand(q, k, position, sinks=None, start=None, first=None, **options):
    """Mass by distance from the materialised scores, in float64: a dictionary of distance to (batch, heads)."""
    doubled = {n: x.double() if n == "hidden" else x for n, x in options.items()}
    position = None if position is None else position.double()
    logits = relpos.scores(q.double(), k.double(), position, start=start, **doubled)
    queries, keys = logits.shape[-2:]
    start = keys - queries if start is None else start
    total = logits.exp().sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    weights = (logits.exp() / total).nan_to_num(0.0)
    rows = (weights.sum(-1) > 0).sum(-1).clamp(min=1)
    i, j = torch.arange(start, start + queries)[:, None], torch.arange(keys)
    at = torch.zeros(1, 1, 1, 1) if first is None else first[:, None, start : start + queries, None]
    is_first = at == j
    first_key = (weights * is_first).sum((-2, -1))
    by_distance = {
        d: (weights * ~is_first * (i - j == d)).sum((-2, -1)) for d in range(start - keys + 1, start + queries)
    }
    if position is not None:
        position.float()
    return {d: x / rows for d, x in by_distance.items()}, first_key / rows


def check(q, k, position, backend, sinks=None, first=None, **options):
    mass = relpos.mass(q, k, position, sinks=sinks, backend=backend, **options)
    by_distance, first_key = by_hand(q, k, position, sinks, first=first, **options)
    ours = {int(d): mass.by_distance[:, :, n].double() for n, d in enumerate(mass.distances)}
    for d, expected in by_distance.items():
        torch.testing.assert_close(ours.get(d, torch.zeros_like(expected)), expected, rtol=0.0, atol=2e-6)
    torch.testing.assert_close(mass.first_key.double(), first_key, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("backend", [None, "chunks"])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_sum_of_the_weights_at_each_distance(name, backend):
    q, k = inputs()
    position, options = build(name)
    check(q, k, position, backend, **options)


@pytest.mark.parametrize("backend", [None, "chunks"])
@pytest.mark.parametrize("options", [
    {"window": 20},
    {"causal": False, "window": (3, 70)},
    {"causal": False},
    {"softcap": 1.5},
    {"padding": torch.arange(LENGTH) >= torch.tensor([[70], [0]])},
    {"sinks": torch.tensor([0.5, -1.0, 2.0, 4.0])},
], ids=str)  # fmt: skip
def test_every_argument_of_attention_counts(options, backend):
    q, k = inputs()
    check(q, k, relpos.encoding("kerple_log", HEADS, HEAD_DIM), backend, **options)


@pytest.mark.parametrize("backend", [None, "chunks"])
def test_the_first_token_of_each_document_is_the_one_apart(backend):
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor([40, 81, 29])).expand(2, -1)
    q, k = inputs()
    check(q, k, None, backend, documents=documents, first=document_ends(documents)[0])


@pytest.mark.parametrize("backend", [None, "chunks"])
def test_queries_may_stand_anywhere(backend):
    q, k = inputs(queries=9)
    check(q, k, relpos.encoding("alibi", HEADS, HEAD_DIM), backend, causal=False, start=70)
    check(q, k, relpos.encoding("alibi", HEADS, HEAD_DIM), backend)


def test_each_head_adds_up_to_one():
    q, k = inputs()
    mass = relpos.mass(q, k, relpos.encoding("rope", HEADS, HEAD_DIM))
    torch.testing.assert_close(mass.by_distance.sum(-1) + mass.first_key, torch.ones(2, HEADS))


def test_uniform_attention_has_a_closed_form():
    """With q = 0, query i gives 1 / (i + 1) to each key: distance d gets (H_n − H_d) / n, without the first key."""
    n = 200
    mass = relpos.mass(torch.zeros(1, 1, n, 4), torch.zeros(1, 1, n, 4))
    harmonic = [0.0, *torch.cumsum(1 / torch.arange(1, n + 1, dtype=torch.float64), 0).tolist()]
    expected = torch.tensor([(harmonic[n] - harmonic[d + 1]) / n for d in range(n)])
    torch.testing.assert_close(mass.by_distance[0, 0], expected, rtol=1e-5, atol=1e-7)
    assert mass.first_key.item() == pytest.approx(harmonic[n] / n, rel=1e-5)


def test_a_head_that_sees_nothing_has_no_mass():
    q, k = inputs()
    mass = relpos.mass(q, k, padding=torch.zeros(2, LENGTH, dtype=torch.bool))
    assert mass.by_distance.abs().max() == 0
    assert mass.first_key.abs().max() == 0


def test_other_backends_are_refused():
    q, k = inputs()
    with pytest.raises(ValueError, match="'native' or 'chunks', not 'flex'"):
        relpos.mass(q, k, backend="flex")
    with pytest.raises(ValueError, match="'native' cannot run this"):
        relpos.mass(q, k, relpos.encoding("cope", HEADS, HEAD_DIM), backend="native")


def test_gaps_in_positions_are_distances():
    positions = torch.tensor([[0, 3, 4, 10]])
    q, k = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8)
    mass = relpos.mass(q, k, relpos.encoding("alibi", 1, 8), positions=positions)
    weights = relpos.scores(q, k, relpos.encoding("alibi", 1, 8), positions=positions).softmax(-1)[0, 0]
    assert mass.by_distance[0, 0, 7].item() == pytest.approx(weights[3, 1].item() / 4, rel=1e-5)  # 10 − 3
    assert math.isclose(mass.first_key.item(), weights[:, 0].mean().item(), rel_tol=1e-5)
