"""The numbers behind the pictures, held to dense and independent computations."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import relpos
from relpos.attend.arguments import LayerCall
from relpos.maps import map as maps
from relpos.maps.head_values import head_values
from relpos.maps.layer import encoding_layer, model_layers, open_layer
from relpos.maps.map import map_of_layer
from relpos.maps.values import HeadValues
from relpos.models import RelposGPT2Config, RelposGPT2ForCausalLM
from relpos.models.family import family_of

HEADS, HEAD_DIM = 3, 8
TOEPLITZ = [name for name in relpos.names() if relpos.card(name).form == "Toeplitz"]


def small_model(name, **options):
    config = RelposGPT2Config(
        n_layer=2, n_head=HEADS, n_embd=HEADS * HEAD_DIM, vocab_size=50, position={"name": name, **options}
    )
    model = RelposGPT2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # away from a start where much is 0
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def encoding(name, **options):
    return relpos.encoding(name, heads=HEADS, head_dim=HEAD_DIM, **options)


def dense(layer, show):
    """The full map in one piece, float64 (heads, length, length), NaN where not seen."""
    return layer.rows(show, 0, layer.length - 1).double().numpy()


@pytest.mark.parametrize("name", ["cable", "rope", "dapev2", "learned", "cope", "fire", "nope"])
def test_the_weights_are_those_the_model_attends_with(name):
    """Weights of the map, times the model's own values, through its own projection: what its attention gave."""
    model, ids, given_out = small_model(name), torch.randint(50, (11,)), {}
    for number in (1, 2):
        model.transformer.h[number - 1].attn.register_forward_hook(
            lambda _, inputs, out, number=number: given_out.__setitem__(number, (inputs[0], out))
        )
    for layer in model_layers(family_of(model), model, ids, (1, 2)):
        attention = model.transformer.h[layer.number - 1].attn
        x, out = given_out[layer.number]
        weights = layer.rows("weights", 0, 10).nan_to_num()  # (heads, 11, 11)
        torch.testing.assert_close(weights.sum(-1), torch.ones(HEADS, 11))
        _, _, v = attention.project(x)
        ours = attention.c_proj((weights @ v[0]).transpose(0, 1).reshape(1, 11, -1))
        torch.testing.assert_close(ours, out, rtol=1e-4, atol=1e-5)


def test_the_scores_of_rope_are_those_of_complex_numbers():
    """RoPE by hand: pairs of the model's own q and k as complex numbers, turned by e^(i·position·θ)."""
    model, length = small_model("rope").double(), 13
    seen = {}
    model.transformer.h[1].attn.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0]))
    (layer,) = model_layers(family_of(model), model, torch.randint(50, (length,)), [2])
    q, k, _ = (x[0].detach().numpy() for x in model.transformer.h[1].attn.project(seen["x"]))
    half = HEAD_DIM // 2
    theta = 10000.0 ** (-2 * np.arange(half) / HEAD_DIM)
    turn = np.exp(1j * np.arange(length)[:, None] * theta)  # (length, pairs)
    q, k = ((x[..., :half] + 1j * x[..., half:]) * turn for x in (q, k))
    scores = np.einsum("hip,hjp->hij", q, k.conj()).real / math.sqrt(HEAD_DIM)
    ours = dense(layer, "scores")
    rows, columns = np.tril_indices(length)
    np.testing.assert_allclose(ours[:, rows, columns], scores[:, rows, columns], rtol=1e-5, atol=1e-6)
    assert np.isnan(ours[:, *np.triu_indices(length, 1)]).all()


@pytest.mark.parametrize("name", ["kerple_log", "cable", "dape"])
def test_the_bias_of_a_layer_is_the_encodings_own_map(name):
    model, ids = small_model(name), torch.randint(50, (9,))
    seen = {}
    attention = model.transformer.h[0].attn
    attention.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0]))
    (layer,) = model_layers(family_of(model), model, ids, [1])
    q, k, _ = attention.project(seen["x"])
    full = attention.position.map(hidden=seen["x"], q=q, k=k)[0]
    torch.testing.assert_close(layer.rows("bias", 0, 8).nan_to_num(nan=-torch.inf), full)


def test_rows_are_the_same_alone_as_together():
    for name, show in (("dapev2", "bias"), ("cope", "weights"), ("rope", "scores"), ("fire", "bias")):
        layer = encoding_layer(encoding(name), 20)
        full = layer.rows(show, 0, 19)
        torch.testing.assert_close(layer.rows(show, 7, 9), full[:, 7:10, :10], equal_nan=True)


def cells(values, size):
    """Minimum, mean and maximum of every cell, one by one."""
    side = math.ceil(values.shape[-1] / size)
    reduced = np.full((3, len(values), side, side), np.nan)
    for head, row, column in np.ndindex(len(values), side, side):
        inside = values[head, row * size : (row + 1) * size, column * size : (column + 1) * size]
        inside = inside[np.isfinite(inside)]
        if inside.size:
            reduced[:, head, row, column] = inside.min(), inside.mean(), inside.max()
    return reduced


@given(
    name=st.sampled_from(["kerple_log", "t5", "fire", "cable", "sum", "kcable", "dape", "rope"]),
    length=st.integers(1, 70),
    pixels=st.integers(1, 40),
    numbers=st.sampled_from([1, 300, 2000, 10**6]),
)
@settings(max_examples=40, deadline=None)
def test_tiles_reduce_to_what_the_dense_map_reduces_to(name, length, pixels, numbers):
    torch.manual_seed(length)
    position = encoding(name)
    show = "bias" if position.place == "score" else "scores"
    layer, second = encoding_layer(position, length), encoding_layer(position, length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maps, "NUMBERS", numbers)
        computed = map_of_layer(layer, show, second, pixels)
    assert computed.mean.shape[-1] <= pixels
    full, compared = dense(layer, show), dense(second, show)
    for ours, direct in zip((computed.low, computed.mean, computed.high), cells(full, computed.cell), strict=True):
        np.testing.assert_allclose(ours, direct, rtol=1e-5, atol=1e-6)
    for distance in range(length):
        along = np.diagonal(full, -distance, 1, 2)  # (heads, entries)
        direct = along.min(1), along.mean(1), along.max(1)
        np.testing.assert_allclose(computed.profile[:, :, distance], direct, rtol=1e-5, atol=1e-6)
    for head in range(HEADS):
        uniform, context = measured(full[head], compared[head])
        assert computed.uniformity.heads[head] == (None if uniform is None else pytest.approx(uniform, abs=1e-6))
        assert computed.context.heads[head] == (None if context is None else pytest.approx(context, abs=1e-6))


def measured(first, second):
    """Uniformity of one map and context dependence of two, as they are defined: None where nothing varies."""
    seen = np.tril_indices(len(first))
    within = sum(np.diagonal(first, -r).var() * (len(first) - r) for r in range(len(first))) / len(seen[0])
    both = np.stack([first[seen], second[seen]])
    constant = [values.std() < 1e-6 * np.abs(values).max() + 1e-30 for values in both]
    uniform = None if constant[0] else 1 - within / first[seen].var()
    return uniform, None if all(constant) else ((both[0] - both[1]) ** 2).mean() / (2 * both.var())


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


@pytest.mark.parametrize("length", [40, 1100])  # written out in full, and from the last rows alone
@pytest.mark.parametrize("name", TOEPLITZ)
def test_static_encodings_are_exactly_uniform_and_exactly_free_of_context(name, length):
    computed = map_of_layer(encoding_layer(encoding(name), length), "bias", encoding_layer(encoding_of(name), length))
    constant = float(np.nanmin(computed.low)) == float(np.nanmax(computed.high))  # as of a window: no ratio exists
    uniformity, context = (None, None) if constant else (1.0, 0.0)
    assert (computed.uniformity.overall, computed.context.overall) == (uniformity, context)
    assert computed.uniformity.heads == [uniformity] * HEADS
    assert computed.context.heads == [context] * HEADS


def encoding_of(name):
    """The same start values again."""
    torch.manual_seed(0)
    return encoding(name)


def test_a_learned_table_that_differs_by_input_is_not_free_of_context():
    """So the test above can fail."""
    first, second = (encoding_layer(encoding("clipped"), 1100) for _ in range(2))
    assert map_of_layer(first, "bias", second).context.overall > 0.5


def test_numbers_over_all_heads_pool_their_sums_of_squares():
    layer, second = (encoding_layer(encoding("cable"), 30) for _ in range(2))
    computed = map_of_layer(layer, "bias", second)
    rows, columns = np.tril_indices(30)
    weight = dense(layer, "bias")[:, rows, columns].var(1)
    expected = 1 - sum((1 - u) * w for u, w in zip(computed.uniformity.heads, weight, strict=True)) / weight.sum()
    assert computed.uniformity.overall == pytest.approx(expected)
    assert min(computed.context.heads) <= computed.context.overall <= max(computed.context.heads)


def test_unrelated_maps_have_a_context_dependence_of_about_one():
    q, k = torch.randn(2, 1, 2, 200, 64)
    other_q, other_k = torch.randn(2, 1, 2, 200, 64)
    computed = map_of_layer(
        open_layer(1, LayerCall(q, k, None, {})), "scores", open_layer(1, LayerCall(other_q, other_k, None, {}))
    )
    assert computed.context.overall == pytest.approx(1, abs=0.02)
    assert computed.uniformity.overall == pytest.approx(200 / 20100, abs=0.004)  # diagonals / entries, by chance


def test_a_key_that_a_bias_hides_is_not_counted():
    class Window(type(encoding("alibi"))):
        def bias(self, call):
            form = super().bias(call)
            return type(form)(form.table.masked_fill(call.distances > 5, -torch.inf), form.zero)

    position = Window(2, 8)
    for length in (20, 600):
        computed = map_of_layer(encoding_layer(position, length), "bias", encoding_layer(position, length))
        assert computed.range() == (-5 / 16, 0.0)
        assert computed.uniformity.overall == 1.0
        assert computed.context.overall == 0.0
        assert np.isnan(computed.mean[:, -1, 0]).all()


def test_broken_weights_get_a_sentence():
    model = small_model("alibi")
    with torch.no_grad():
        model.transformer.h[0].mlp.c_proj.bias[0] = torch.nan
    with pytest.raises(ValueError, match="the input of layer 2 is not finite"):
        model_layers(family_of(model), model, torch.randint(50, (5,)), [1, 2])


@pytest.mark.parametrize("length", [1, 2, 37, 300])
@pytest.mark.parametrize("name", ["fire", "cable", "cable_nw", "forgetting"])
def test_cells_and_diagonals_from_the_form_are_those_of_the_entries(name, length):
    """FIRE with a threshold within the sequence, and a function that rises and falls."""
    position = encoding(name, **({"length": 20} if name == "fire" else {}))
    if name == "fire":
        with torch.no_grad():
            for parameter in (position.inner.weight, position.inner.bias, position.outer.weight):
                parameter.normal_()
    layer = encoding_layer(position, length)
    values = head_values(layer, 1, "bias")
    assert values.closed
    size = -(-length // 30)
    side = -(-length // size)
    with torch.no_grad():
        for ours, direct in zip(
            values.cells(0, side, 0, side, size), HeadValues.cells(values, 0, side, 0, side, size), strict=True
        ):
            torch.testing.assert_close(ours.double(), direct.double(), rtol=1e-5, atol=1e-4)
        computed, direct = values.diagonals(), HeadValues.diagonals(values)
        exact = ("count", "mean", "variance", "within", "between", *(("low", "high") if computed.extremes else ()))
        for name_ in (*exact, "largest"):
            torch.testing.assert_close(getattr(computed, name_), getattr(direct, name_), rtol=1e-5, atol=1e-4)
        profile = values.profile(torch.arange(length))
        torch.testing.assert_close(profile, direct.profile[:, 0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("show", ["bias", "scores", "weights"])
@pytest.mark.parametrize("name", ["kerple_log", "cable", "fire", "sum", "cope", "nope"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_profile_is_that_of_the_diagonals(name, show, causal):
    position = encoding(name)
    if (show == "bias" and position.place != "score") or not (causal or position.bidirectional):
        return
    values = head_values(encoding_layer(position, 40, causal), 1, show)
    distances = torch.tensor([0, 1, 5, 39] if causal else [-39, -3, 0, 1, 39])
    with torch.no_grad():
        dense = values.block(0, 40, 0, 40).double()
        expected = []
        for distance in distances.tolist():
            along = dense.diagonal(-distance)
            expected.append(torch.stack([along.min(), along.mean(), along.max()]))
        torch.testing.assert_close(values.profile(distances), torch.stack(expected, 1), rtol=1e-5, atol=1e-5)


def test_the_distance_between_two_inputs_follows_from_running_sums():
    first, second = (head_values(encoding_layer(encoding("cable"), 200), 0, "bias") for _ in range(2))
    apart = (first.block(0, 200, 0, 200) - second.block(0, 200, 0, 200)).double().square().nansum()
    assert first.squared_difference(second) == pytest.approx(float(apart), rel=1e-5)
    assert first.squared_difference(first) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alibi", "fire", "cable"])
def test_65536_tokens_of_a_static_encoding_take_little_memory(name):
    script = Path(__file__).parents[2] / "benchmarks" / "draw.py"
    run = subprocess.run([sys.executable, script, name, "--json"], capture_output=True, text=True, check=True)
    (measurement,) = json.loads(run.stdout)
    assert measurement["megabytes"] < 1024
