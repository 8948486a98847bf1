"""The form Projected: products of vectors per token with a table over distances, in memory of block × length."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from largest_tensor import LargestTensor

from relpos.attend import chunks, flex, native, reference
from relpos.forms.bias import Projected, Sum, Toeplitz, locate
from relpos.forms.call import Call


def by_loop(form, distance_of, i, j, batch):
    """The formula, entry by entry."""
    heads = form.vectors.shape[1]
    out = torch.zeros(batch, heads, len(i), len(j), dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for r, query in enumerate(i.tolist()):
                for c, key in enumerate(j.tolist()):
                    column = distance_of(b, query, key) + form.zero
                    row = column if form.row is None else int(form.row[column])
                    token = key if form.of_keys else query - form.first
                    vector = form.vectors[b if len(form.vectors) > 1 else 0, h, token]
                    out[b, h, r, c] = vector @ form.table[h if len(form.table) > 1 else 0, row]
    return out


@st.composite
def cases(draw):
    """Sizes, whether distances share rows, whose vectors, and which rows and columns are asked for."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    batch, heads, size = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    queries, keys = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    call = Call(
        queries, keys, causal=False, dtype=torch.float64, start=draw(st.integers(0, 4)), batch=batch, heads=heads
    )
    number = len(call.distances)
    rows = draw(st.integers(1, 5)) if draw(st.booleans()) else None
    of_keys = draw(st.booleans())
    form = Projected(
        torch.randn(
            draw(st.sampled_from([1, batch])),
            heads,
            keys if of_keys else queries,
            size,
            dtype=torch.float64,
            generator=generator,
        ),
        torch.randn(draw(st.sampled_from([1, heads])), rows or number, size, dtype=torch.float64, generator=generator),
        call.zero,
        None if rows is None else torch.randint(rows, (number,), generator=generator),
        of_keys,
        call.first,
    )
    some = torch.randperm(queries, generator=generator)[: draw(st.integers(1, queries))] + call.first
    others = torch.randperm(keys, generator=generator)[: draw(st.integers(1, keys))]
    return form, some, others


@settings(max_examples=60, deadline=None)
@given(cases())
def test_any_block_is_the_formula(case):
    form, i, j = case
    expected = by_loop(form, lambda b, query, key: query - key, i, j, len(form.vectors))
    torch.testing.assert_close(form.block(i, j), expected)


def test_given_positions_are_those_of_the_distances():
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([[0, 2, 3, 7], [1, 2, 5, 6]])
    call = Call(4, 4, causal=False, dtype=torch.float64, token_positions=positions, batch=2, heads=2)
    for of_keys in (False, True):
        vectors = torch.randn(1, 2, 4, 3, dtype=torch.float64, generator=generator)
        table = torch.randn(2, len(call.distances), 3, dtype=torch.float64, generator=generator)
        form = locate(Projected(vectors, table, call.zero, of_keys=of_keys), call)
        expected = by_loop(form, lambda b, query, key: int(positions[b, query] - positions[b, key]), call.i, call.j, 2)
        torch.testing.assert_close(form.block(call.i, call.j), expected)


def forms(call, generator, rows=6, size=5, dtype=torch.float64):
    """One of each side, and a table besides."""

    def random(*shape):
        return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()

    row = call.distances.long().clamp(-rows // 2, rows // 2 - 1) + rows // 2
    sizes = ((call.queries, False), (call.keys, True))
    return Sum(
        (
            *(
                Projected(
                    random(call.batch, call.heads, tokens, size),
                    random(call.heads, rows, size),
                    call.zero,
                    row,
                    of_keys,
                    call.first,
                )
                for tokens, of_keys in sizes
            ),
            Toeplitz(torch.randn(call.heads, len(call.distances), dtype=dtype, generator=generator), call.zero),
        )
    )


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_have_the_values_and_gradients_of_the_definition(causal, monkeypatch):
    monkeypatch.setattr(chunks, "block_size", lambda *_: 4)
    generator = torch.Generator().manual_seed(0)
    padding = torch.ones(2, 11, dtype=torch.bool)
    padding[1, 8:] = False
    call = Call(11, 11, causal=causal, padding=padding, dtype=torch.float64, scale=0.5, batch=2, heads=3)
    q, k, v = (torch.randn(2, 3, 11, 5, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3))
    form = forms(call, generator)
    leaves = [q, k, v, *(x for _, x in form.tensors() if x.requires_grad)]
    assert len(leaves) == 7
    results = []
    for backend in (chunks, reference):
        out, _ = backend.attention(q, k, v, form, call)
        results.append((out, *torch.autograd.grad((out * torch.arange(5)).sum(), leaves)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


def test_faster_backends_refuse_it_with_a_sentence():
    call = Call(4, 4, causal=False, heads=2)
    form = Projected(torch.zeros(1, 2, 4, 3), torch.zeros(2, 7, 3), call.zero)
    q = torch.zeros(1, 2, 4, 8)
    assert "cannot run the form Projected" in native.refuses(q, q, form, call)
    assert flex.refuses(q.to("meta"), q, form, call) is not None


def test_nothing_of_queries_by_keys_is_materialised_forward_or_backward():
    length, heads, rows = 1024, 4, 32
    generator = torch.Generator().manual_seed(0)
    call = Call(length, length, causal=False, heads=heads, scale=0.5)
    q, k, v = (torch.randn(1, heads, length, 8, generator=generator).requires_grad_() for _ in range(3))
    form = forms(call, generator, rows, 8, torch.float32)
    with LargestTensor() as largest:
        out, _ = chunks.attention(q, k, v, form, call)
        out.sum().backward()
    block = chunks.block_size(q, form, call)
    assert block < length / 2
    assert largest.values <= heads * length * max(block, rows)
