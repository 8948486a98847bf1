"""Mass profiles of layers, against weights that are materialised and added up one by one."""

import pytest
import torch

import relpos
from relpos.attend.arguments import LayerCall
from relpos.maps.distance_profiles import half_distances, layer_mass, mean_profile, stacked
from relpos.maps.layer import encoding_layer, open_layer

HEADS, HEAD_DIM, LENGTH = 4, 8, 60


def layer(name="rope", causal=True, seed=0, length=LENGTH):
    """Four heads that share two key heads."""
    torch.manual_seed(seed)
    q, k = torch.randn(1, HEADS, length, HEAD_DIM), torch.randn(1, 2, length, HEAD_DIM)
    position = relpos.encoding(name, heads=HEADS, head_dim=HEAD_DIM)
    return open_layer(3, LayerCall(q, k, position, {"causal": causal}))


def by_hand(shown):
    """The mass by distance as a dictionary, and the share of the first key, from the materialised weights."""
    weights = shown.rows("weights", 0, shown.length - 1).double().nan_to_num(0.0)
    masses = {}
    for i in range(shown.length):
        for j in range(1, shown.length):
            masses[i - j] = masses.get(i - j, 0) + weights[:, i, j] / shown.length
    return masses, weights[:, :, 0].mean(dim=1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["rope", "alibi", "kerple_log"])
def test_the_mass_of_a_layer_is_the_sum_of_its_weights(name, causal):
    shown = layer(name, causal)
    profile = layer_mass(shown)
    masses, first = by_hand(shown)
    assert (profile.layer, profile.heads, profile.length, profile.windows) == (3, HEADS, LENGTH, 1)
    for column, distance in enumerate(profile.distances.tolist()):
        expected = masses.get(distance, torch.zeros(HEADS, dtype=torch.float64))
        torch.testing.assert_close(profile.by_distance[:, column], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(profile.first_key, first, rtol=0, atol=1e-6)
    torch.testing.assert_close(profile.sink, first, rtol=0, atol=1e-6)  # no other sink
    folded = torch.stack([masses.get(d, 0) + (masses.get(-d, 0) if d and not causal else 0) for d in range(LENGTH - 1)])
    torch.testing.assert_close(profile.folded[:, : LENGTH - 1], folded.T, rtol=0, atol=1e-6)


def test_windows_are_averaged():
    first, second, third = (layer_mass(layer(seed=seed)) for seed in range(3))
    mean = mean_profile([mean_profile([first, second]), third])
    assert mean.windows == 3
    expected = (first.by_distance + second.by_distance + third.by_distance) / 3
    torch.testing.assert_close(mean.by_distance, expected)
    torch.testing.assert_close(
        mean.first_key + mean.by_distance.sum(1), torch.ones(HEADS, dtype=torch.float64), rtol=1e-5, atol=0
    )


def test_profiles_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="layer 3 with 30 tokens, layer 3 with 60 tokens"):
        mean_profile([layer_mass(layer()), layer_mass(layer(length=30))])
    with pytest.raises(ValueError, match="at least one window"):
        mean_profile([])


def test_half_of_the_mass_lies_within_the_half_distance():
    mass = torch.tensor([[1.0, 1, 1, 1], [5, 1, 1, 1], [0, 0, 0, 2], [0, 0, 0, 0]], dtype=torch.float64)
    assert half_distances(mass) == [1, 0, 3, None]
    profile = layer_mass(encoding_layer(relpos.encoding("alibi", heads=8, head_dim=8), 256))
    assert profile.half_distance == sorted(profile.half_distance)  # slopes fall from head to head
    for head, half in enumerate(profile.half_distance):
        running = profile.folded[head].cumsum(0) / profile.folded[head].sum()
        assert running[half] >= 0.5 - 1e-9
        assert half == 0 or running[half - 1] < 0.5


def test_learned_sinks_take_their_share():
    from dataclasses import replace

    shown = layer()
    sinks = torch.tensor([-3.0, 0.0, 2.0, 5.0])
    profile = layer_mass(replace(shown, call=replace(shown.call, sinks=sinks)))
    logits = shown.rows("scores", 0, LENGTH - 1).double().nan_to_num(-torch.inf)
    with_sink = torch.cat([logits, sinks.double()[:, None, None].expand(-1, LENGTH, 1)], dim=-1).softmax(-1)
    assert profile.learned_sinks
    torch.testing.assert_close(profile.sink, (with_sink[..., 0] + with_sink[..., -1]).mean(1), rtol=0, atol=1e-6)
    torch.testing.assert_close(profile.first_key, with_sink[..., 0].mean(1), rtol=0, atol=1e-6)


def test_layers_of_one_shape_are_stacked():
    profiles = [layer_mass(layer()), layer_mass(layer(causal=False)), layer_mass(layer(seed=1))]
    groups = list(stacked(profiles))
    assert [places for places, _ in groups] == [[0, 2], [1]]
    assert torch.equal(groups[0][1].by_distance[HEADS:], profiles[2].by_distance)
