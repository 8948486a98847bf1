"""Attention and scores by distance: against materialised weights, shuffled pairs, and transformers' own arithmetic."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2Model

import relpos
from relpos.attend.arguments import LayerCall, make_call
from relpos.maps.distance_profiles import (
    equal_tokens,
    flat_mass,
    half_distances,
    layer_mass,
    layer_scores,
    mass_of_weights,
    mean_profile,
    mean_scores,
    rotation_kernel,
    stacked,
    token_means,
)
from relpos.maps.layer import encoding_layer, model_layers, open_layer
from relpos.maps.values import TensorValues
from relpos.models.family import family_of, get_family

HEADS, KEY_HEADS, HEAD_DIM, LENGTH = 4, 2, 16, 48
ROPES = [
    {},
    {"layout": "interleaved"},
    {"fraction": 0.5, "base": 100.0},
    {"scaling": "yarn", "factor": 4.0, "length": 128},
]


def tokens(seed, length=LENGTH):
    """Queries and keys with means of their own, so that the rotation has something to turn."""
    generator, shift = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(99)
    return [
        torch.randn(1, heads, length, HEAD_DIM, generator=generator)
        + torch.randn(1, heads, 1, HEAD_DIM, generator=shift)
        for heads in (HEADS, KEY_HEADS)
    ]


def layer(seed=0, causal=True, name="rope", tokens_read=LENGTH, **options):
    """Four heads that share two key heads."""
    position = relpos.encoding(name, heads=HEADS, head_dim=HEAD_DIM, **options)
    return open_layer(3, LayerCall(*tokens(seed, tokens_read), position, {"causal": causal}))


def mass_by_hand(shown):
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
    shown = layer(name=name, causal=causal)
    weights = shown.rows("weights", 0, LENGTH - 1)
    masses, first = mass_by_hand(shown)
    for profile in (layer_mass(shown), mass_of_weights([TensorValues(head) for head in weights], 3)):
        assert (profile.layer, profile.heads, profile.length, profile.windows) == (3, HEADS, LENGTH, 1)
        for column, distance in enumerate(profile.distances.tolist()):
            expected = masses.get(distance, torch.zeros(HEADS, dtype=torch.float64))
            torch.testing.assert_close(profile.by_distance[:, column], expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(profile.first_key, first, rtol=0, atol=1e-6)
        torch.testing.assert_close(profile.sink, first, rtol=0, atol=1e-6)  # no other sink
        both = [masses.get(d, 0) + (masses.get(-d, 0) if d and not causal else 0) for d in range(LENGTH - 1)]
        torch.testing.assert_close(profile.folded[:, : LENGTH - 1], torch.stack(both).T, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["alibi", "window"])
def test_the_mass_of_equal_content_follows_from_the_table(name):
    shown = encoding_layer(relpos.encoding(name, 2, 8, **({"size": 7} if name == "window" else {})), 60)
    direct, closed = layer_mass(shown), flat_mass(shown)
    assert closed.window == direct.window
    torch.testing.assert_close(closed.by_distance, direct.by_distance, rtol=0, atol=1e-6)
    torch.testing.assert_close(closed.first_key, direct.first_key, rtol=0, atol=1e-6)


def test_windows_are_averaged_and_layers_of_one_shape_stacked():
    first, second, third = (layer_mass(layer(seed)) for seed in range(3))
    mean = mean_profile([mean_profile([first, second]), third])
    assert mean.windows == 3
    torch.testing.assert_close(mean.by_distance, (first.by_distance + second.by_distance + third.by_distance) / 3)
    groups = list(stacked([first, layer_mass(layer(causal=False)), second]))
    assert [places for places, _ in groups] == [[0, 2], [1]]
    assert torch.equal(groups[0][1].by_distance[HEADS:], second.by_distance)
    with pytest.raises(ValueError, match="layer 3 with 30 tokens, layer 3 with 48 tokens"):
        mean_profile([first, layer_mass(layer(tokens_read=30))])
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
    shown, sinks = layer(), torch.tensor([-3.0, 0.0, 2.0, 5.0])
    profile = layer_mass(replace(shown, call=replace(shown.call, sinks=sinks)))
    logits = shown.rows("scores", 0, LENGTH - 1).double().nan_to_num(-torch.inf)
    with_sink = torch.cat([logits, sinks.double()[:, None, None].expand(-1, LENGTH, 1)], dim=-1).softmax(-1)
    assert profile.learned_sinks
    torch.testing.assert_close(profile.sink, (with_sink[..., 0] + with_sink[..., -1]).mean(1), rtol=0, atol=1e-6)
    torch.testing.assert_close(profile.first_key, with_sink[..., 0].mean(1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_the_mean_score_is_that_of_the_pairs_at_a_distance(causal):
    windows = [layer(seed, causal) for seed in range(3)]
    profile = mean_scores([layer_scores(window) for window in windows])
    scores = np.stack([window.rows("scores", 0, LENGTH - 1).double().numpy() for window in windows])
    assert profile.windows == 3
    for column, distance in enumerate(profile.distances.tolist()):
        pairs = [(i, i - distance) for i in range(LENGTH) if 1 <= i - distance < LENGTH]
        if not pairs:  # only the first key is so far away
            assert bool(profile.mean[:, column].isnan().all())
            continue
        rows, columns = zip(*pairs, strict=True)
        values = scores[:, :, rows, columns].transpose(1, 0, 2).reshape(HEADS, -1)
        np.testing.assert_allclose(profile.mean[:, column], values.mean(1), atol=1e-9)
        np.testing.assert_allclose(profile.deviation[:, column], values.std(1), atol=1e-6)


@pytest.mark.parametrize("options", ROPES, ids=str)
def test_the_kernel_is_the_mean_score_of_all_shuffled_pairs(options):
    """Every query token is paired with every key token, both are put at a distance d, and relpos rotates them."""
    kernel = rotation_kernel([token_means(layer(seed, **options)) for seed in range(2)])
    position = relpos.encoding("rope", heads=HEADS, head_dim=HEAD_DIM, **options)
    q, k = (torch.cat([tokens(seed)[place][0, :, 1:] for seed in range(2)], dim=1) for place in range(2))
    k = k.repeat_interleave(HEADS // KEY_HEADS, dim=0)
    for distance in (0, 1, 7, 31):
        turned = []
        for place, x in ((1, q), (0, k)):
            both = torch.zeros(x.shape[1], HEADS, 2, HEAD_DIM)
            both[:, :, place] = x.transpose(0, 1)
            at = torch.tensor([[40 - distance, 40]]).expand(len(both), -1)
            rotated = position.rotate(both, both, make_call(both, both, position, positions=at))
            turned.append(rotated[1 - place][:, :, place].double())
        scores = torch.einsum("thd,shd->hts", *turned) * HEAD_DIM**-0.5
        expected = scores.mean(dim=(1, 2))
        torch.testing.assert_close(kernel.total(torch.tensor([distance]))[:, 0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", ROPES, ids=str)
def test_equal_tokens_have_the_kernel_as_their_scores(options):
    position = relpos.encoding("rope", heads=HEADS, head_dim=HEAD_DIM, **options)
    q, k = (x[:, :, :1].expand(-1, -1, LENGTH, -1) for x in tokens(5))
    shown = open_layer(1, LayerCall(q, k, position, {}))
    kernel, distances = rotation_kernel([token_means(shown)]), torch.arange(LENGTH)
    last = shown.rows("scores", LENGTH - 1, LENGTH - 1)[:, 0].double().flip(-1)  # by distance
    torch.testing.assert_close(kernel.total(distances), last, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kernel.bands(distances).sum(1) + kernel.constant[:, None], kernel.total(distances))
    assert (float(kernel.constant.abs().max()) > 0) == (options.get("fraction", 1.0) < 1)


def test_the_frequencies_are_those_of_rope_and_others_have_none():
    kernel = rotation_kernel([token_means(layer(base=1000.0))])
    expected = 1000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    torch.testing.assert_close(kernel.frequencies, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(kernel.wavelengths, 2 * torch.pi / expected, rtol=1e-5, atol=0)
    for name in ("alibi", "xpos"):
        with pytest.raises(ValueError, match="layer 3 does not rotate queries and keys by frequencies"):
            token_means(layer(name=name))


def test_position_terms_of_gpt2_are_those_of_transformers_on_equal_tokens():
    """δq·δk of layers 1 and 2, from the hidden states of transformers' GPT-2 for the mean embedding."""
    torch.manual_seed(0)
    sizes = {"n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 3}
    original = GPT2Model(GPT2Config(vocab_size=50, **sizes)).eval()
    with torch.no_grad():
        original.wpe.weight.mul_(10)
    family = get_family("gpt2")
    config = family.config_class(vocab_size=50, **sizes, position={"name": "learned", "length": 32})
    ours = family.model_class(config).eval()
    missing = ours.load_state_dict({f"transformer.{n}": x for n, x in original.state_dict().items()}, strict=False)
    assert not missing.unexpected_keys
    ids = torch.arange(3, 23)
    with torch.no_grad():
        mean = original.wte.weight[3:23].mean(0).expand(1, 20, -1)
        states = original(inputs_embeds=mean, output_hidden_states=True).hidden_states
    layers = equal_tokens(ours, lambda: model_layers(family_of(ours), ours, ids, (1, 2)))
    for block, state, shown in zip(original.h, states, layers, strict=False):
        with torch.no_grad():
            q, k, _ = block.attn.c_attn(block.ln_1(state))[0].double().split(24, dim=-1)
        dq, dk = ((x - x.mean(0)).reshape(20, 3, 8).transpose(0, 1) for x in (q, k))
        expected = dq @ dk.transpose(1, 2) / 8**0.5
        scores, seen = shown.rows("scores", 0, 19).double(), torch.ones(20, 20, dtype=torch.bool).tril()
        torch.testing.assert_close(scores[:, seen], expected[:, seen], rtol=1e-3, atol=1e-4)
        assert float(expected.abs().max()) > 0.01
    with torch.no_grad():  # the hook is gone
        first, second = (ours(ids[None].roll(n, dims=1)).logits for n in (0, 1))
    assert not torch.allclose(first, second)
