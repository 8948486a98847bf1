"""relpos.use on models of images and sound: positions of speech reach attention as vectors and a table."""

import copy

import pytest
import torch
from largest_tensor import LargestTensor
from senses_models import ALL, SPEECH, long_sound, real_frames, senses_batch, senses_model, states_and_gradients
from small_models import assert_equal, assert_same

import relpos
from relpos.attend.arguments import make_call
from relpos.forms.bias import Projected, terms
from relpos.models.attention_interface import captured_calls

PROJECTED = [name for name in SPEECH if "rotary" not in name]
LINEAR = [name for name in PROJECTED if not name.startswith("seamless_m4t_v2")]  # it has a mask of its own


@pytest.mark.parametrize("name", ALL)
def test_states_and_all_gradients_equal_eager_and_off_restores_the_bits(name):
    model, inputs = senses_model(name), senses_batch(name)
    theirs = states_and_gradients(model, inputs)
    attributes = {each: set(vars(module)) for each, module in model.named_modules()}
    relpos.use(model)
    assert_same(states_and_gradients(model, inputs), theirs)
    for one in (copy.deepcopy(model), model):
        relpos.use(one, off=True)
        assert {key: set(vars(module)) for key, module in one.named_modules()} == attributes
        assert_equal(states_and_gradients(one, inputs), theirs)


@pytest.mark.parametrize("name", SPEECH)
def test_the_bias_reaches_attention_as_vectors_and_a_table(name):
    model = relpos.use(senses_model(name))
    positions = []
    with captured_calls(model, lambda module, q, k, position, arguments: positions.append((position, q))):
        model(**senses_batch(name))
    assert len(positions) >= 2
    for position, q in positions:
        parts = [] if position is None else terms(position.bias(make_call(q, q, position, causal=False)))
        assert [type(part) for part in parts] == ([Projected] if name in PROJECTED else [])


@pytest.mark.parametrize("name", LINEAR)
def test_no_tensor_of_a_long_forward_and_backward_has_queries_by_keys_values(name):
    model = relpos.use(senses_model(name))
    frames = 900
    with LargestTensor() as largest:
        model(**long_sound(name, frames)).last_hidden_state.square().mean().backward()
    assert largest.values < 4 * frames**2 / 2  # of 4 heads


def test_dropped_positions_of_parakeet_are_those_of_eager():
    """Each sequence then has a table of its own, so the layer keeps its code; the random numbers are the same."""
    states, inputs = [], senses_batch("parakeet_encoder")
    for ours in (False, True):
        model = senses_model("parakeet_encoder", dropout_positions=0.4, attention_dropout=0.0, activation_dropout=0.0)
        model.train()
        if ours:
            relpos.use(model)
        torch.manual_seed(0)
        states.append(real_frames(model, model(**inputs).last_hidden_state, inputs["attention_mask"]))
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_torch_compile_makes_one_graph():
    model = senses_model("wav2vec2-bert relative")
    inputs = {"input_features": senses_batch("wav2vec2-bert relative")["input_features"]}
    theirs = model(**inputs).last_hidden_state
    ours = torch.compile(relpos.use(model), fullgraph=True, backend="aot_eager")(**inputs).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
