"""What makes a decoding step of our models fast changes nothing: caches that grow in place, logits in parts."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from relpos.models import RelposGPT2Config, RelposGPT2ForCausalLM
from relpos.models.cache import GrowingLayer, make_growing
from relpos.models.logits import logits_of

STEPS = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 90)),
    st.tuples(st.just("crop"), st.integers(1, 5)),
    st.tuples(st.just("reorder"), st.permutations([0, 1])),
    st.tuples(st.just("deepcopy"), st.none()),
)


@given(st.lists(STEPS, max_size=8))
def test_a_growing_layer_holds_what_transformers_own_holds_and_never_changes_what_it_gave(steps):
    ours, theirs = GrowingLayer(), DynamicLayer()
    snapshots = []
    for what, argument in [("update", 3), *steps]:
        if what == "update":
            new = torch.randn(2, 2, 3, argument, 4).unbind(0)
            with torch.no_grad():
                both = zip(ours.update(*new), theirs.update(*new), strict=True)
            assert all(torch.equal(a, b) for a, b in both)
        elif what == "crop":
            many = min(argument, ours.get_seq_length() - 1)
            ours.crop(-many)
            theirs.crop(-many)
        elif what == "reorder":
            ours.reorder_cache(torch.tensor(argument))
            theirs.reorder_cache(torch.tensor(argument))
        else:
            ours = copy.deepcopy(ours)
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
        snapshots.append((ours.keys, ours.keys.clone(), ours.values, ours.values.clone()))
    for keys, keys_then, values, values_then in snapshots:
        assert torch.equal(keys, keys_then)
        assert torch.equal(values, values_then)


def test_a_step_writes_the_new_tokens_only():
    layer = GrowingLayer()
    with torch.no_grad():
        layer.update(*torch.randn(2, 1, 2, 10, 4).unbind(0))
        memory = layer.keys.data_ptr()
        for _ in range(20):
            layer.update(*torch.randn(2, 1, 2, 1, 4).unbind(0))
    assert layer.keys.data_ptr() == memory
    assert layer.keys.shape[2] == 30


def test_what_a_backward_pass_reads_is_not_overwritten():
    layer = GrowingLayer()
    with torch.no_grad():
        layer.update(*torch.randn(2, 1, 2, 5, 4).unbind(0))
    q = torch.randn(1, 2, 1, 4, requires_grad=True)
    keys, _ = layer.update(*torch.randn(2, 1, 2, 1, 4).unbind(0))
    loss = (q * keys).pow(2).sum()
    expected = (2 * q * keys.pow(2)).sum(dim=2, keepdim=True).detach()
    with torch.no_grad():
        layer.update(*torch.randn(2, 1, 2, 1, 4).unbind(0))
    loss.backward()
    torch.testing.assert_close(q.grad, expected)


def test_a_cache_of_inference_mode_is_used_after_it():
    layer = GrowingLayer()
    with torch.inference_mode():
        layer.update(*torch.randn(2, 1, 2, 5, 4).unbind(0))
    with torch.no_grad():
        keys, _ = layer.update(*torch.randn(2, 1, 2, 1, 4).unbind(0))
    assert keys.shape[2] == 6
    assert not keys.is_inference()


def test_other_caches_stay_what_they_are():
    class Own(DynamicCache):
        pass

    cache = Own()
    make_growing(cache)
    assert cache.layer_class_to_replicate is DynamicLayer
    filled = DynamicCache([(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4))])
    before = filled.layers[0].keys
    make_growing(filled)
    assert type(filled.layers[0]) is GrowingLayer
    assert filled.layers[0].keys is before


@pytest.mark.usefixtures("two_threads")
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 23), st.integers(1, 9))
def test_logits_in_parts_are_the_product_with_the_matrix(batch, tokens, vocabulary, width):
    head, hidden = nn.Linear(width, vocabulary, bias=False), torch.randn(batch, tokens, width)
    with torch.no_grad():
        out = logits_of(head, hidden)
        expected = F.linear(hidden.double(), head.weight.double())
    assert out.shape == (batch, tokens, vocabulary)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("two_threads")
def test_an_output_layer_with_a_hook_or_a_gradient_is_called_as_it_is():
    head, hidden, calls = nn.Linear(4, 7, bias=False), torch.randn(1, 1, 4), []
    logits_of(head, hidden).sum().backward()
    torch.testing.assert_close(head.weight.grad, hidden[0].expand(7, 4))
    handle = head.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        logits_of(head, hidden)
        handle.remove()
        logits_of(head, hidden)
    assert calls == [1]


@pytest.mark.usefixtures("two_threads")
def test_a_model_decodes_in_place_what_it_decodes_from_scratch():
    config = RelposGPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=61, position="rope", initializer_range=0.5)
    model, tokens = RelposGPT2ForCausalLM(config).eval(), torch.randint(61, (2, 90))
    with torch.no_grad():
        cache = model(tokens[:, :5], use_cache=True).past_key_values
        steps = [model(tokens[:, t : t + 1], past_key_values=cache).logits for t in range(5, 90)]
        whole = model(tokens, use_cache=False).logits[:, 5:]
    assert type(cache.layers[0]) is GrowingLayer
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-4)
