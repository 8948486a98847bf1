"""Our models decode through `relpos.Cache` in any cache of transformers, and logits in parts are the product."""

import copy

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, StaticCache

from relpos.models import RelposGPT2Config, RelposGPT2ForCausalLM
from relpos.models.base import DecodingLayer
from relpos.models.decoder import logits_of


def build(position):
    config = RelposGPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=61, position=position, initializer_range=0.5)
    return RelposGPT2ForCausalLM(config).eval()


@pytest.mark.parametrize("position", ["rope", "cable", "kerple_log"])
def test_a_model_decodes_what_it_computes_at_once_in_every_kind_of_cache(position):
    class Own(DynamicCache):
        pass

    model, tokens = build(position), torch.randint(61, (2, 30))
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits[:, 5:]
        for kind in (None, DynamicCache(), DynamicCache(config=model.config), StaticCache(model.config, 100), Own()):
            cache = model(tokens[:, :5], use_cache=True, past_key_values=kind).past_key_values
            steps = [model(tokens[:, t : t + 1], past_key_values=cache).logits for t in range(5, 30)]
            assert all(type(layer) is DecodingLayer for layer in cache.layers)
            assert cache.get_seq_length() == 30
            torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("position", ["rope", "cable"])
def test_rows_are_chosen_repeated_cropped_and_copied_as_generate_does(position):
    model, tokens = build(position), torch.randint(61, (2, 12))
    cache = model(tokens[:, :8], use_cache=True).past_key_values
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 1, 3]))
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.crop(-2)
    other = copy.deepcopy(cache)
    rows = tokens[[1, 0, 0]]
    expected = model(rows, use_cache=False).logits[:, 6:]
    for own in (cache, other):
        out = [model(rows[:, t : t + 1], past_key_values=own).logits for t in range(6, 12)]
        torch.testing.assert_close(torch.cat(out, dim=1), expected, rtol=0, atol=1e-4)
    assert cache.layers[0].get_mask_sizes(1) == (13, 0)
    assert cache.layers[0].keys.shape == cache.layers[0].values.shape == (3, 2, 12, 8)
    cache.reset()
    assert cache.get_seq_length() == 0


def test_a_cache_of_another_model_is_refused():
    model, tokens = build("alibi"), torch.randint(61, (1, 3))
    filled = DynamicCache([(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8))])
    with pytest.raises(ValueError, match="with 3 tokens: pass an empty DynamicCache or StaticCache"):
        model(tokens, past_key_values=filled)
    cache = model(tokens, use_cache=True).past_key_values
    with pytest.raises(TypeError, match=r"relpos\.attention\(…, cache=layer\.state\)"):
        cache.update(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8), 0)
    offloading = DynamicCache()
    offloading.offloading = True
    with pytest.raises(ValueError, match="pass a cache without offloading"):
        model(tokens, past_key_values=offloading)


def test_gates_are_cached_in_float32_beside_half_precision_values():
    model, tokens = build("cable").half(), torch.randint(61, (1, 9))  # bfloat16 products are illegal on some CPUs
    state = model(tokens[:, :8], use_cache=True).past_key_values.layers[0].state
    block = model.transformer.h[0]
    gates = block.attn.position.gates(block.ln_1(model.transformer.wte(tokens[:, :8])))
    assert state.tensor("v").dtype == torch.float16
    assert gates.dtype == torch.float32
    torch.testing.assert_close(state.tensor("gates"), gates, rtol=0, atol=0)


def test_beams_and_cropped_drafts_keep_the_gates():
    model, prompt = build("cable"), torch.randint(1, 61, (2, 6))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    beams, alone = (model.generate(prompt, num_beams=3, use_cache=use, **options) for use in (True, False))
    assert torch.equal(beams, alone)
    draft = transformers.AutoModelForCausalLM.from_config(model.config).eval()
    assisted = model.generate(prompt[:1], assistant_model=draft, **options)
    assert torch.equal(assisted, model.generate(prompt[:1], **options))


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
