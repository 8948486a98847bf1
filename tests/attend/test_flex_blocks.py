"""The blocks that FlexAttention computes: exact, small, made once for all layers, without waiting for the device."""

import gc
import random
import weakref

import pytest
import torch
from largest_tensor import LargestTensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

import relpos
from relpos.attend.flex import kernel as blocks
from relpos.attend.flex import scores
from relpos.forms.call import Call


def random_call(seed):
    """A call with any combination of what hides keys, at odd lengths of a few blocks."""
    draw = random.Random(seed)
    batch, causal = draw.choice([1, 3]), draw.random() < 0.5
    keys, queries = draw.randint(1, 700), draw.randint(128, 700)
    start = keys - queries if keys >= queries and draw.random() < 0.5 else draw.randint(0, 500)
    among = start + queries <= keys
    documents = padding = window = None
    if among and draw.random() < 0.6:
        share = draw.choice([0.003, 0.02, 0.3])
        documents = (torch.rand(batch, keys, generator=torch.Generator().manual_seed(seed)) < share).long().cumsum(1)
    if draw.random() < 0.5:
        ends = torch.tensor([[draw.randint(0, keys)] for _ in range(batch)])
        padding = torch.arange(keys).expand(batch, -1) < ends
        if draw.random() < 0.5:
            padding = padding.flip(1) & (torch.arange(keys) % draw.choice([2, 129, 1000]) > 0)
    if draw.random() < 0.6:
        window = (draw.choice([0, 1, 100, 128, 300]), draw.choice([0, 1, 127, 200]))
    return Call(
        queries,
        keys,
        causal=causal,
        documents=documents,
        padding=padding,
        start=start,
        window=window,
        batch=batch,
        heads=2,
    )


def mask_of(call):
    made = blocks.make_sight(call)
    function = scores.mask_function(call, made.lowest, made.highest)
    return made, function


def as_matrix(pair, columns):
    """Which blocks an ordered list names: (batch, 1, rows, columns)."""
    numbers, indices = pair
    listed = torch.zeros(*indices.shape[:-1], columns, dtype=torch.bool)
    counts = torch.arange(indices.shape[-1]) < numbers[..., None]
    return listed.scatter(-1, indices.long(), counts)


@pytest.mark.parametrize("seeds", range(10))
def test_the_blocks_are_those_of_create_block_mask(seeds):
    """Partial and full ones, for keys and for queries, from intervals alone; PyTorch evaluates every entry."""
    for seed in range(20 * seeds, 20 * seeds + 20):
        call = random_call(seed)
        made, function = mask_of(call)
        ours = blocks.block_mask(made.blocks, function, call)
        theirs = create_block_mask(function, call.batch, None, call.queries, call.keys, device="cpu")
        assert torch.equal(ours.to_dense().expand_as(theirs.to_dense()), theirs.to_dense()), seed
        for kind in ("kv", "full_kv", "q", "full_q"):
            lists = [
                as_matrix((getattr(mask, f"{kind}_num_blocks"), getattr(mask, f"{kind}_indices")), 8)
                for mask in (ours, theirs)
            ]
            assert torch.equal(lists[0].expand_as(lists[1]), lists[1]), (seed, kind)


@pytest.mark.parametrize("seeds", range(4))
def test_the_mask_function_is_what_a_query_sees(seeds):
    for seed in range(20 * seeds, 20 * seeds + 20):
        call = random_call(seed)
        _, function = mask_of(call)
        sizes = (call.batch, 1, call.queries, call.keys)
        index = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
        assert torch.equal(function(*index), call.visible(call.i).expand(sizes)), seed


def test_a_given_mask_leaves_out_no_block_and_makes_all_partial():
    mask = torch.zeros(300, 300, dtype=torch.bool)
    plain, masked = (blocks.make_sight(Call(300, 300, mask=given)).blocks for given in (None, mask))
    assert not masked.full[0].any()
    assert torch.equal(masked.partial[0], plain.partial[0] + plain.full[0])


@pytest.mark.parametrize("what", ["causal", "window", "documents", "padding"])
def test_making_blocks_allocates_nothing_of_the_size_of_the_scores(what):
    length, batch = 2**15, 2
    documents = torch.arange(length).expand(batch, -1) // 1000 if what == "documents" else None
    padding = torch.arange(length).expand(batch, -1) > 99 if what == "padding" else None
    call = Call(
        length,
        length,
        causal=True,
        documents=documents,
        padding=padding,
        window=(512, 0) if what == "window" else None,
        batch=batch,
    )
    with LargestTensor() as largest:
        blocks.make_sight(call)
    of_blocks = (length // blocks.BLOCK) ** 2
    assert largest.values <= batch * max(length + 1, of_blocks)  # 131 thousand of the 1 billion scores per head
    with LargestTensor() as theirs:
        _, function = mask_of(Call(1024, 1024))
        create_block_mask(function, 1, None, 1024, 1024, device="cpu")
    assert theirs.values >= 1024**2  # what is measured sees PyTorch's own way


@pytest.fixture
def recent(monkeypatch):
    made = []
    original = blocks.make_sight
    monkeypatch.setattr(blocks, "make_sight", lambda call: made.append(call) or original(call))
    monkeypatch.setattr(blocks, "RECENT", blocks.Recent(8))
    return made


def test_the_layers_of_a_forward_share_their_blocks(recent):
    documents, padding = torch.zeros(1, 200).long(), torch.ones(1, 200).bool()
    for _ in range(2):  # a second forward with the same tensors finds them again
        for window in (None, (50, 0)) * 3:
            blocks.sight(Call(200, 200, causal=True, documents=documents, padding=padding, window=window))
    assert len(recent) == 2


def test_other_tensors_and_changed_ones_are_not_confused(recent):
    padding = torch.ones(1, 200).bool()
    first = blocks.sight(Call(200, 200, padding=padding))
    padding[0, :128] = False  # in place
    second = blocks.sight(Call(200, 200, padding=padding))
    third = blocks.sight(Call(200, 200, padding=padding.clone()))
    assert len(recent) == 3
    assert first.blocks.partial[0].tolist() != second.blocks.partial[0].tolist() == third.blocks.partial[0].tolist()


def test_what_is_kept_is_bounded_and_keeps_no_argument_alive(recent):
    documents = torch.zeros(1, 200).long()
    gone = weakref.ref(documents)
    blocks.sight(Call(200, 200, causal=True, documents=documents))
    del documents
    recent.clear()
    gc.collect()
    assert gone() is None
    for keys in range(200, 264):  # 64 decoding steps
        for _ in range(3):
            blocks.sight(Call(1, keys))
    assert len(recent) == 64  # one for each step, not for each layer
    assert len(blocks.RECENT) == 8


def test_what_is_made_in_inference_mode_can_be_trained_with(recent):
    with torch.inference_mode():
        made = blocks.sight(Call(200, 200))
        scale = scores.scalar(0.123456, Call(1, 1))
        blocks.sight(Call(200, 200, padding=torch.ones(1, 200).bool()))  # it does not count its changes: not kept
    assert not made.lowest.is_inference()
    assert not scale.is_inference()
    assert len(blocks.RECENT) == 1


@pytest.mark.parametrize("name", [None, "alibi", "kerple_log", "t5", "cable", "fire", "rope", "xpos"])
@pytest.mark.parametrize("queries", [1, 300])
def test_no_value_is_read_by_the_host(monkeypatch, name, queries):
    """With tensors that have no values, everything up to the kernel runs: a read would raise.

    They say that they are on the CPU, as this PyTorch cannot index others. So the checks that are made of values on a
    CPU only, before a backend is chosen, are switched off.
    """
    calls = []

    def kernel(q, k, v, *rest):
        calls.append(rest)
        return v.new_empty(*q.shape[:3], v.shape[3]), None

    monkeypatch.setattr("relpos.attend.flex.kernel.compiled", lambda form: kernel)
    monkeypatch.setattr("relpos.attend.flex.refuses", lambda *arguments: None)
    for module in ("forms.call", "attend.arguments", "attend.reference"):
        monkeypatch.setattr(f"relpos.{module}.has_values", lambda x: False)
    monkeypatch.setattr(blocks, "RECENT", blocks.Recent(8))
    scores._kept_scalar.cache_clear()
    with FakeTensorMode():
        position = None if name is None else relpos.encoding(name, heads=4, head_dim=16)
        q, k, v = torch.empty(2, 4, queries, 16), *torch.empty(2, 2, 4, 300, 16)
        documents, padding = torch.zeros(2, 300, dtype=torch.long), torch.ones(2, 300, dtype=torch.bool)
        masks = {"documents": documents, "padding": padding, "mask": torch.ones(1, 300, dtype=torch.bool)}
        out = relpos.attention(
            q, k, v, position, hidden=torch.empty(2, 300, 64), window=100, sinks=torch.empty(4), backend="flex", **masks
        )
        with pytest.raises(DataDependentOutputException):  # what a read would do
            bool(padding.any())
    scores._kept_scalar.cache_clear()
    assert len(calls) == 1
    assert out.shape == q.shape
