"""The maps of layers behind the pictures, in one direction and in both, held to dense scores and to numpy."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from dense_layers import DenseLayer, reduce_cells
from hypothesis import given, settings
from hypothesis import strategies as st

import relpos
from relpos.maps import map as maps
from relpos.maps.layer import encoding_layer, model_layers
from relpos.maps.map import map_of_layer
from relpos.maps.scaled import has_pieces
from relpos.models import RelposGPT2Config, RelposGPT2ForCausalLM
from relpos.models.family import family_of

HEADS, HEAD_DIM = 3, 8
TOEPLITZ = [name for name in relpos.names() if relpos.card(name).form == "Toeplitz"]


def encoding(name, **options):
    if name == "symmetric fire":
        return relpos.encoding("fire", HEADS, HEAD_DIM, length=20, symmetric=True)
    return relpos.encoding(name, HEADS, HEAD_DIM, **options)


BOTH = [*(name for name in relpos.names() if encoding(name).bidirectional), "symmetric fire"]


def opened_layer(position, length, causal):
    return DenseLayer(position, length, dtype=torch.float64, causal=causal)


DIRECTIONS = [*((name, True) for name in relpos.names()), *((name, False) for name in BOTH)]


@pytest.mark.parametrize(("name", "causal"), DIRECTIONS)
def test_rows_are_those_of_the_dense_scores(name, causal):
    for length in (1, 13):
        opened = opened_layer(encoding(name), length, causal)
        assert opened.layer.causal == causal
        for show in ["scores", "weights"] + ["bias"] * (opened.layer.form is not None):
            rows = opened.layer.rows(show, 0, length - 1)
            np.testing.assert_allclose(rows, opened.dense(show), rtol=1e-6, atol=1e-9)
            middle = opened.layer.rows(show, length // 2, length // 2)[:, 0]  # alone as together
            np.testing.assert_allclose(middle, rows[:, length // 2, : middle.shape[-1]], rtol=1e-9, atol=1e-12)


def small_model(name):
    position = {"name": name}
    config = RelposGPT2Config(n_layer=2, n_head=HEADS, n_embd=HEADS * HEAD_DIM, vocab_size=50, position=position)
    model = RelposGPT2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # away from a start where much is 0
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", ["cable", "rope", "dapev2", "learned", "cope", "fire", "nope"])
def test_the_weights_are_those_the_model_attends_with(name):
    """Weights of the map, times the model's own values, through its own projection: what its attention gave."""
    model, ids, seen = small_model(name), torch.randint(50, (11,)), {}
    for number in (1, 2):
        model.transformer.h[number - 1].attn.register_forward_hook(
            lambda _, inputs, out, number=number: seen.__setitem__(number, (inputs[0], out))
        )
    for layer in model_layers(family_of(model), model, ids, (1, 2)):
        attention = model.transformer.h[layer.number - 1].attn
        x, out = seen[layer.number]
        weights = layer.rows("weights", 0, 10).nan_to_num()  # (heads, 11, 11)
        torch.testing.assert_close(weights.sum(-1), torch.ones(HEADS, 11))
        _, _, v = attention.project(x)
        ours = attention.c_proj((weights @ v[0]).transpose(0, 1).reshape(1, 11, -1))
        torch.testing.assert_close(ours, out, rtol=1e-4, atol=1e-5)


def check_cells(computed, values):
    for ours, direct in zip(
        (computed.low, computed.mean, computed.high), reduce_cells(values, computed.cell), strict=True
    ):
        np.testing.assert_allclose(ours, direct, rtol=1e-5, atol=1e-6)


def measure(first, second):
    """Uniformity of one map and context dependence of two, as they are defined: None where nothing varies."""
    seen = np.isfinite(first)
    diagonals = [np.diagonal(first, -d) for d in range(1 - len(first), len(first))]
    diagonals = [values[np.isfinite(values)] for values in diagonals if np.isfinite(values).any()]
    within = sum(values.var() * len(values) for values in diagonals) / seen.sum()
    both = np.stack([first[seen], second[seen]])
    constant = [values.std() < 1e-6 * np.abs(values).max() + 1e-30 for values in both]
    uniform = None if constant[0] else 1 - within / first[seen].var()
    return uniform, None if all(constant) else ((both[0] - both[1]) ** 2).mean() / (2 * both.var())


NAMES = ["alibi", "rope", "clipped", "t5", "kerple_log", "cable", "sum", "sandwich", "dape", "fire", "kcable"]


@given(
    name=st.sampled_from(NAMES),
    causal=st.booleans(),
    show=st.sampled_from(["bias", "scores", "weights"]),
    length=st.integers(1, 70),
    pixels=st.integers(1, 40),
    numbers=st.sampled_from([1, 300, 2000, 10**6]),
)
@settings(max_examples=80, deadline=None)
def test_a_map_is_what_the_dense_map_reduces_to(name, causal, show, length, pixels, numbers):
    torch.manual_seed(length)
    position = encoding("symmetric fire" if name == "fire" and not causal else name)
    causal = causal or not position.bidirectional
    opened, other = opened_layer(position, length, causal), opened_layer(position, length, causal)
    show = "scores" if opened.layer.form is None else show
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maps, "NUMBERS", numbers)
        computed = map_of_layer(opened.layer, show, other.layer, pixels)
    values, compared = opened.dense(show), other.dense(show)
    assert computed.mean.shape[-1] <= pixels
    assert computed.causal == causal
    check_cells(computed, values)
    np.testing.assert_array_equal(computed.distances, np.arange(0 if causal else 1 - length, length))
    for column, distance in enumerate(computed.distances):
        along = np.diagonal(values, -distance, 1, 2)  # query − key
        direct = (along.min(1), along.mean(1), along.max(1))
        np.testing.assert_allclose(computed.profile[:, :, column], direct, rtol=1e-5, atol=1e-6)
    for head in range(HEADS):
        uniform, context = measure(values[head], compared[head])
        assert computed.uniformity.heads[head] == (None if uniform is None else pytest.approx(uniform, abs=1e-6))
        assert computed.context.heads[head] == (None if context is None else pytest.approx(context, abs=1e-6))


@pytest.mark.parametrize("length", [513, 1025, 1100])  # cells of 2 and 3 entries a side, the last ones cut off
@pytest.mark.parametrize("name", ["alibi", "clipped", "t5"])
def test_a_long_bias_of_the_distance_is_exact_without_its_entries(name, length, monkeypatch):
    opened = opened_layer(encoding(name), length, False)
    monkeypatch.setattr(maps, "_pass_over_entries", lambda *arguments: pytest.fail("the entries were computed"))
    computed = map_of_layer(opened.layer, "bias", opened.layer)
    values = opened.dense("bias")
    assert computed.cell == math.ceil(length / 512)
    check_cells(computed, values)
    expected = np.concatenate([values[:, 0, :0:-1], values[:, :, 0]], axis=1)
    np.testing.assert_allclose(computed.profile[1], expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_long_bias_of_symmetric_fire_is_computed_entry_by_entry():
    """Its rows are not the scales of keys after the query: it must not be reduced by its pieces."""
    opened = opened_layer(encoding("symmetric fire"), 600, False)
    assert has_pieces(encoding_layer(opened.position, 600).form)
    assert not has_pieces(opened.layer.form)
    check_cells(map_of_layer(opened.layer, "bias"), opened.dense("bias"))


@pytest.mark.parametrize("name", ["nope", "cable"])
def test_constant_maps_have_no_context_dependence_and_no_uniformity(name):
    """Two different constants made it 2: what differs between them cancels in the softmax."""
    position = encoding(name)
    if name == "cable":
        with torch.no_grad():
            position.steps.bias.fill_(-100.0)  # every gate is closed
    first, second = (encoding_layer(position, 20) for _ in range(2))
    computed = map_of_layer(first, "bias" if name == "cable" else "scores", second)
    assert computed.context.heads == computed.uniformity.heads == [None] * HEADS
    assert computed.context.overall is computed.uniformity.overall is None


def test_one_constant_head_leaves_the_numbers_of_the_others_alone():
    position = encoding("cable")
    layers = [encoding_layer(position, 20) for _ in range(2)]
    before = map_of_layer(layers[0], "bias", layers[1])
    for layer in layers:
        layer.form.total[:, 1] = 0.0
    computed = map_of_layer(layers[0], "bias", layers[1])
    assert computed.uniformity.heads == [before.uniformity.heads[0], None, before.uniformity.heads[2]]
    assert computed.context.heads == [before.context.heads[0], None, before.context.heads[2]]
    assert 0 < computed.uniformity.overall < 1


@pytest.mark.parametrize("length", [40, 141, 1100])  # written out in full, and from the last rows alone
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", TOEPLITZ)
def test_static_encodings_are_exactly_uniform_and_exactly_free_of_context(name, causal, length):
    """Also where sums of squares would round: the deviations from the first entry of a diagonal are exactly 0."""
    position = encoding(name)
    layers = [encoding_layer(position, length, causal) for _ in range(2)]
    computed = map_of_layer(layers[0], "bias", layers[1])
    constant = float(np.nanmin(computed.low)) == float(np.nanmax(computed.high))  # as of a window: no ratio exists
    uniformity, context = (None, None) if constant else (1.0, 0.0)
    assert (computed.uniformity.overall, computed.context.overall) == (uniformity, context)
    assert computed.uniformity.heads == [uniformity] * HEADS
    assert computed.context.heads == [context] * HEADS


def test_numbers_over_all_heads_pool_their_sums_of_squares():
    layer, second = (encoding_layer(encoding("cable"), 30) for _ in range(2))
    computed = map_of_layer(layer, "bias", second)
    rows, columns = np.tril_indices(30)
    weight = layer.rows("bias", 0, 29).double().numpy()[:, rows, columns].var(1)
    expected = 1 - sum((1 - u) * w for u, w in zip(computed.uniformity.heads, weight, strict=True)) / weight.sum()
    assert computed.uniformity.overall == pytest.approx(expected)
    assert min(computed.context.heads) <= computed.context.overall <= max(computed.context.heads)


def test_a_key_that_a_bias_hides_is_not_counted():
    class Window(type(encoding("alibi"))):
        def bias(self, call):
            form = super().bias(call)
            return type(form)(form.table.masked_fill(call.distances > 5, -torch.inf), form.zero)

    position = Window(2, 8)
    for length in (20, 600):
        computed = map_of_layer(encoding_layer(position, length), "bias", encoding_layer(position, length))
        assert computed.range() == (-5 / 16, 0.0)
        assert (computed.uniformity.overall, computed.context.overall) == (1.0, 0.0)
        assert np.isnan(computed.mean[:, -1, 0]).all()


def test_broken_weights_get_a_sentence():
    model = small_model("alibi")
    with torch.no_grad():
        model.transformer.h[0].mlp.c_proj.bias[0] = torch.nan
    with pytest.raises(ValueError, match="the input of layer 2 is not finite"):
        model_layers(family_of(model), model, torch.randint(50, (5,)), [1, 2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alibi", "fire", "cable"])
def test_65536_tokens_of_an_encoding_take_little_memory(name):
    script = Path(__file__).parents[2] / "benchmarks" / "draw.py"
    run = subprocess.run([sys.executable, script, name, "--json"], capture_output=True, text=True, check=True)
    (measurement,) = json.loads(run.stdout)
    assert measurement["megabytes"] < 1024
