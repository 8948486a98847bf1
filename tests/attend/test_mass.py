"""The attention of each head by distance, by the kernel and by blocks, against weights that are materialised."""

import math

import pytest
import torch
from kernel_cases import FAMILIES, documents, normal, rotation
from torch import Tensor

import relpos
from relpos.attend import native, reference
from relpos.attend.by_distance import sums_by_block
from relpos.attend.native import library
from relpos.forms.call import Call, document_ends

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("two_threads")]
ISAS = library.isas() if native.available()[0] else []
HEADS, HEAD_DIM, LENGTH = 4, 8, 150


def by_definition(q: Tensor, k: Tensor, form, call: Call) -> tuple[Tensor, Tensor]:
    """Means over the queries that see a key, from all weights in float64."""
    logits, visible = reference.logits(*call.rotated(q, k), form, call, call.i)
    logits = logits.masked_fill(~visible, -torch.inf)
    if call.sinks is not None:
        logits = torch.cat([logits, call.sinks[:, None, None].expand(*logits.shape[:3], 1)], -1)
    weights = logits.softmax(-1)[..., : call.keys].nan_to_num()  # (batch, heads, queries, keys)
    rows = (visible.expand_as(weights).any(-1)).sum(-1).clamp(min=1)  # (batch, heads)
    first = torch.zeros(1, call.queries, dtype=torch.long)
    if call.documents is not None:
        first = document_ends(call.documents)[0][:, call.first : call.first + call.queries]
    is_first = (call.j == first[:, :, None])[:, None]  # (1 or batch, 1, queries, keys)
    column = call.i[:, None] - call.j + call.zero
    rest = weights.masked_fill(is_first, 0.0).flatten(2)
    sums = torch.zeros(*weights.shape[:2], len(call.distances), dtype=torch.float64)
    seen = (column >= 0).flatten()  # a causal call has no distances of the future
    sums.index_add_(2, column.flatten()[seen], rest[:, :, seen])
    return sums / rows[..., None], (weights * is_first).sum((-1, -2)) / rows


def means(q: Tensor, k: Tensor, form, call: Call, sums=native.mass) -> tuple[Tensor, Tensor]:
    """The same by the kernel, or by blocks."""
    by_distance, first_key, rows = sums(q, k, form, call)
    return by_distance / rows.clamp(min=1)[..., None], first_key / rows.clamp(min=1)


CALLS = {
    "plain": lambda: {},
    "start": lambda: {"start": 20},
    "window": lambda: {"window": (40, 10)},
    "documents": lambda: {"documents": torch.stack([documents(50, 50, 70), documents(120, 50)])},
    "padding": lambda: {"padding": torch.rand(2, 170) > 0.4},
    "no key": lambda: {"padding": torch.zeros(2, 170, dtype=torch.bool)},
    "sinks": lambda: {"sinks": torch.randn(4, dtype=torch.float64)},
    "softcap": lambda: {"softcap": 1.0},
    "rotation": lambda: {"rotation": rotation(2, 100, 170, 12, "half")},
}


@pytest.mark.parametrize(
    ("causal", "name"),
    [
        pytest.param(causal, name, marks=[] if causal or name in ("plain", "window") else pytest.mark.slow)
        for causal in (True, False)
        for name in CALLS
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_mass_is_that_of_the_weights(family, causal, name):
    torch.manual_seed(0)
    q, k, _, _ = normal(2, 4, 2, 100, 170, 24)
    options = CALLS[name]() | {"causal": causal, "scale": 0.2, "batch": 2, "heads": 4}
    call = Call(100, 170, dtype=torch.float64, **options)
    numbers = FAMILIES[family].numbers(2, 4, call)
    expected = by_definition(q, k, FAMILIES[family].form(numbers, call), call)
    call = Call(100, 170, **options)
    numbers = {n: x if n == "total" else x.float() for n, x in numbers.items()}
    chosen = library.isa()
    try:
        for isa in ISAS:
            library.use(isa)
            ours = means(q.float(), k.float(), FAMILIES[family].form(numbers, call), call)
            for a, b in zip(ours, expected, strict=True):
                torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6)
    finally:
        library.use(chosen)
    blocks = means(q.float(), k.float(), FAMILIES[family].form(numbers, call), call, sums_by_block)
    for a, b in zip(blocks, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6)
    if name not in ("sinks", "no key"):
        seen = ours[0].sum(-1) + ours[1]
        torch.testing.assert_close(seen, torch.ones_like(seen), rtol=0.0, atol=1e-5)


def test_mass_of_queries_beyond_the_keys():
    torch.manual_seed(1)
    q, k, _, _ = normal(1, 2, 2, 150, 70, 16)
    options = {"causal": False, "start": 40, "batch": 1, "heads": 2}
    expected = by_definition(q, k, None, Call(150, 70, dtype=torch.float64, **options))
    for a, b in zip(means(q.float(), k.float(), None, Call(150, 70, **options)), expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6)


def test_mass_does_not_depend_on_the_threads():
    q, k, _, _ = (x.float() for x in normal(1, 3, 1, 500, 500, 16))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(native.mass(q, k, None, Call(500, 500)))
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0.0)


def inputs(queries=LENGTH, keys=LENGTH, batch=2):
    return torch.randn(batch, HEADS, queries, HEAD_DIM), torch.randn(batch, 2, keys, HEAD_DIM)


@pytest.mark.parametrize("backend", [None, "chunks"])
@pytest.mark.parametrize("name", [None, "alibi", "kerple_log", "cable", "fire", "rope", "cope", "sum"])
@pytest.mark.parametrize("queries", [LENGTH, 9])
def test_of_every_kind_of_encoding_it_adds_up_the_diagonals_of_the_weights(name, queries, backend):
    (q, k), hidden = inputs(queries), torch.randn(2, LENGTH, HEADS * HEAD_DIM)
    position = None if name is None else relpos.encoding(name, HEADS, HEAD_DIM)
    given = {"hidden": hidden} if position is not None and position.needs_hidden else {}
    mass = relpos.mass(q, k, position, backend=backend, **given)
    weights = relpos.scores(q, k, position, **given).softmax(-1)  # (batch, heads, queries, keys)
    torch.testing.assert_close(mass.first_key, weights[..., 0].mean(-1), rtol=0.0, atol=2e-6)
    weights[..., 0] = 0.0
    for column, distance in enumerate(mass.distances.tolist()):
        diagonal = weights.diagonal(LENGTH - queries - distance, dim1=2, dim2=3)
        expected = diagonal.sum(-1) / queries
        torch.testing.assert_close(mass.by_distance[..., column], expected, rtol=0.0, atol=2e-6)
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
