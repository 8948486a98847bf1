"""Classes of heads: on profiles of a known kind, made without the code under test, and on heads made for a class."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import relpos
from relpos.attend.arguments import LayerCall
from relpos.maps.curve_fits import fit_curves
from relpos.maps.distance_profiles import MassProfile, layer_mass
from relpos.maps.head_classes import KINDS, class_heads
from relpos.maps.layer import encoding_layer, open_layer

LENGTH = 200


def profile_of(kernel, sink=1.0, length=LENGTH, causal=True):
    """The mass of a head that gives distance d the weight kernel(d) and the first key `sink`, query by query."""
    size = length if causal else 2 * length - 1
    values = np.array([kernel(d) for d in (*range(length), *([] if causal else range(-length, 0)))])
    masses, first = np.zeros(size), 0.0
    for i in range(length):
        keys = np.arange(1, i + 1 if causal else length)
        weights = values[i - keys]  # values[-d] is that of distance −d
        total = sink + weights.sum()
        first += sink / total / length
        np.add.at(masses, i - keys + (0 if causal else length - 1), weights / total / length)
    distances = torch.arange(size) - (0 if causal else length - 1)
    return MassProfile(
        1, length, causal, None, 4, distances, torch.tensor(masses)[None], torch.tensor([first]).double()
    )


def class_of(*arguments, **options):
    return class_heads([profile_of(*arguments, **options)])[0][0]


@settings(max_examples=12, deadline=None)
@given(rate=st.floats(0.03, 0.6), scale=st.floats(0.05, 5.0))
def test_an_exponential_is_decaying_with_its_rate(rate, scale):
    head = class_of(lambda d: scale * math.exp(-rate * d), sink=0.5)
    assert head.kind == ("sink" if head.sink >= 0.75 else "decaying")
    assert head.curve == "exponential"
    assert head.parameters["b"] == pytest.approx(rate, rel=1e-3)
    assert head.parameters["a"] == pytest.approx(scale / 0.5, rel=1e-2)
    assert head.misfit < 1e-3
    assert head.half_distance == head.fitted_half_distance


@settings(max_examples=12, deadline=None)
@given(power=st.floats(0.8, 1.6), scale=st.floats(0.3, 5.0), own=st.floats(0.1, 3.0))
def test_a_power_law_is_decaying_whatever_the_token_itself_gets(power, scale, own):
    head = class_of(lambda d: scale * (d**-power if d else own))
    assert (head.kind, head.curve) == ("decaying", "power")
    assert head.parameters["b"] == pytest.approx(power, rel=1e-3)


def test_a_logarithmic_curve_is_found():
    far = math.log(LENGTH)
    head = class_of(lambda d: 3.0 * (1 - 0.95 * math.log(max(d, 1)) / far))
    assert (head.kind, head.curve) == ("decaying", "logarithmic")
    assert head.parameters["c"] == pytest.approx(0.05, rel=0.05)


@settings(max_examples=8, deadline=None)
@given(scale=st.floats(0.05, 100.0), causal=st.booleans())
def test_equal_weights_are_flat_and_constant(scale, causal):
    head = class_of(lambda d: scale, causal=causal)
    assert (head.kind, head.curve) == ("flat", "constant")
    assert head.parameters["a"] == pytest.approx(scale, rel=1e-2)


@settings(max_examples=8, deadline=None)
@given(share=st.floats(3.0, 50.0), rate=st.floats(0.0, 0.5))
def test_a_head_on_the_first_token_is_a_sink(share, rate):
    total = sum(math.exp(-rate * d) for d in range(LENGTH))
    head = class_of(lambda d: math.exp(-rate * d) / total, sink=share)
    assert head.kind == "sink"
    assert head.sink >= 0.75


@settings(max_examples=10, deadline=None)
@given(period=st.floats(6.0, 30.0), amplitude=st.floats(1.2, 4.0), phase=st.floats(0, 6.28))
def test_a_wave_is_periodic_with_its_period(period, amplitude, phase):
    head = class_of(lambda d: math.exp(amplitude * math.cos(2 * math.pi * d / period + phase)))
    assert head.kind == "periodic"
    assert head.period == pytest.approx(period, rel=0.01)


@pytest.mark.parametrize(("distance", "kind"), [(1, "previous token"), (-1, "next token"), (2, "other")])
def test_a_head_on_one_neighbour(distance, kind):
    head = class_of(lambda d: 5.0 if d == distance else 0.001, causal=False)
    assert head.kind == kind


def test_a_far_sighted_head_is_other():
    head = class_of(lambda d: math.exp(0.05 * d))
    assert (head.kind, head.curve) == ("other", "exponential")
    assert head.parameters["b"] == pytest.approx(-0.05, rel=1e-2)


def test_the_likelihood_is_that_of_one_draw_per_query():
    """L of the exponential curve, query by query with numpy."""
    profile = profile_of(lambda d: 0.4 / (1 + d) ** 2 + 0.01, sink=0.7)
    fit = fit_curves(profile)["exponential"]
    f = fit.kernel[0].numpy()
    expected = sum(-math.log(1 + f[:i].sum()) for i in range(LENGTH))
    expected += LENGTH * float((profile.by_distance[0].numpy() * np.log(f)).sum())
    assert float(fit.likelihood[0]) == pytest.approx(4 * expected)
    assert float(fit.bic[0]) == pytest.approx(3 * math.log(4 * LENGTH) - 8 * expected)
    for change in (0.99, 1.01):  # and it is the largest
        for tilt in (0.9999, 1.0001):
            g = f * change * tilt ** np.arange(LENGTH)
            other = sum(-math.log(1 + g[:i].sum()) for i in range(LENGTH))
            other += LENGTH * float((profile.by_distance[0].numpy() * np.log(g)).sum())
            assert other < expected


def kinds_of(layer):
    return class_heads([layer_mass(layer)])[0]


def test_alibi_heads_decay_with_their_slopes_and_flat_ones_are_flat():
    heads = kinds_of(encoding_layer(relpos.encoding("alibi", heads=8, head_dim=8), 512))
    assert [head.kind for head in heads] == ["decaying"] * 7 + ["flat"]  # the last slope is 1/256 at 512 tokens
    for number, head in enumerate(heads, 1):
        assert head.curve == "exponential"
        assert head.parameters["b"] == pytest.approx(2.0**-number, rel=1e-2)
    assert kinds_of(encoding_layer(relpos.encoding("nope", heads=2, head_dim=8), 512))[0].kind == "flat"
    window = kinds_of(encoding_layer(relpos.encoding("window", heads=2, head_dim=8, size=64), 512))[0]
    assert window.kind == "flat"  # within itself
    assert window.half_distance == pytest.approx(32, abs=4)  # the first queries see fewer


def test_heads_that_are_made_for_a_class():
    position = relpos.encoding("clipped", heads=2, head_dim=8)
    with torch.no_grad():
        position.table.zero_()
        position.table[:, position.limit + 1] = 12.0
    assert [head.kind for head in kinds_of(encoding_layer(position, 256))] == ["previous token", "previous token"]
    q = torch.zeros(1, 1, 512, 16)
    q[..., 3] = 4.0  # one pair of dimensions of RoPE: θ_3 = 100^(−6/16)
    rope = relpos.encoding("rope", heads=1, head_dim=16, base=100.0)
    (head,) = kinds_of(open_layer(1, LayerCall(q, q, rope, {})))
    assert head.kind == "periodic"
    assert head.period == pytest.approx(2 * math.pi / 100 ** (-6 / 16), rel=0.01)
    q, k = torch.ones(1, 1, 256, 8), torch.randn(1, 1, 256, 8, generator=torch.Generator().manual_seed(0)) * 0.1
    k[:, :, 0] = 4.0  # a large first key
    (head,) = kinds_of(open_layer(1, LayerCall(q, k, None, {})))
    assert head.kind == "sink"


def test_the_class_is_json():
    head = class_of(lambda d: math.exp(-0.1 * d))
    read = json.loads(json.dumps(head.as_json()))
    assert read["kind"] in KINDS
    assert type(read["half_distance"]) is int
    assert set(read["bic"]) == {"constant", "exponential", "power", "logarithmic"}
    assert read["bic"][read["curve"]] == min(read["bic"].values())


def test_few_tokens_are_refused():
    with pytest.raises(
        ValueError, match="7 tokens are too few to class heads by distance: give a length of at least 8"
    ):
        class_of(lambda d: 1.0, length=7)
