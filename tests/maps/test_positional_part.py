"""The positional part of the scores: against materialised scores, shuffled pairs, and transformers' own arithmetic."""

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2Model

import relpos
from relpos.attend.arguments import LayerCall
from relpos.maps.distance_profiles import equal_tokens, layer_scores, mean_scores, rotation_kernel, token_means
from relpos.maps.layer import model_layers, open_layer
from relpos.models.family import family_of, get_family

HEADS, KEY_HEADS, HEAD_DIM, LENGTH = 4, 2, 16, 48
ROPES = [
    {},
    {"layout": "interleaved"},
    {"fraction": 0.5, "base": 100.0},
    {"scaling": "yarn", "factor": 4.0, "length": 128},
]


def tokens(seed):
    """Queries and keys with means of their own, so that the rotation has something to turn."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, n, LENGTH, HEAD_DIM, generator=generator) for n in (HEADS, KEY_HEADS))
    shift = torch.Generator().manual_seed(99)
    return q + torch.randn(1, HEADS, 1, HEAD_DIM, generator=shift), k + torch.randn(
        1, KEY_HEADS, 1, HEAD_DIM, generator=shift
    )


def make(q, k, name="rope", causal=True, **options):
    position = relpos.encoding(name, heads=HEADS, head_dim=HEAD_DIM, **options)
    return open_layer(1, LayerCall(q, k, position, {"causal": causal}))


def layer(seed=0, causal=True, **options):
    return make(*tokens(seed), causal=causal, **options)


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
    windows = [layer(seed, **options) for seed in range(2)]
    kernel = rotation_kernel([token_means(window) for window in windows])
    position = relpos.encoding("rope", heads=HEADS, head_dim=HEAD_DIM, **options)
    q, k = (
        torch.cat(x, dim=2)[0]
        for x in zip(*(tuple(y[:, :, 1:] for y in tokens(seed)) for seed in range(2)), strict=True)
    )
    k = k.repeat_interleave(HEADS // KEY_HEADS, dim=0)
    for distance in (0, 1, 7, 31):
        at = torch.tensor([[40 - distance, 40]])
        both = torch.zeros(q.shape[1], HEADS, 2, HEAD_DIM)
        both[:, :, 1] = q.transpose(0, 1)
        turned_q, _ = rotated(position, both, at)
        both[:, :, 0] = k.transpose(0, 1)
        _, turned_k = rotated(position, both, at)
        scores = torch.einsum("thd,shd->hts", turned_q[:, :, 1].double(), turned_k[:, :, 0].double()) * HEAD_DIM**-0.5
        assert scores.shape == (HEADS, 2 * LENGTH - 2, 2 * LENGTH - 2)
        torch.testing.assert_close(
            kernel.total(torch.tensor([distance]))[:, 0], scores.mean(dim=(1, 2)), rtol=1e-4, atol=1e-4
        )


def rotated(position, x, positions):
    from relpos.attend.arguments import make_call

    call = make_call(x, x, position, positions=positions.expand(len(x), -1))
    return position.rotate(x, x, call)


@pytest.mark.parametrize("options", ROPES, ids=str)
def test_equal_tokens_have_the_kernel_as_their_scores(options):
    q, k = (x[:, :, :1].expand(-1, -1, LENGTH, -1) for x in tokens(5))
    shown = make(q, k, **options)
    kernel = rotation_kernel([token_means(shown)])
    last = shown.rows("scores", LENGTH - 1, LENGTH - 1)[:, 0].double().flip(-1)  # by distance
    distances = torch.arange(LENGTH)
    torch.testing.assert_close(kernel.total(distances), last, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kernel.bands(distances).sum(1) + kernel.constant[:, None], kernel.total(distances))
    assert (float(kernel.constant.abs().max()) > 0) == (options.get("fraction", 1.0) < 1)


def test_the_frequencies_are_those_of_rope():
    kernel = rotation_kernel([token_means(layer(base=1000.0))])
    expected = 1000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    torch.testing.assert_close(kernel.frequencies, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(kernel.wavelengths, 2 * torch.pi / expected, rtol=1e-5, atol=0)


def test_a_layer_without_frequencies_has_no_kernel():
    for name in ("alibi", "xpos"):
        shown = make(*tokens(0), name=name)
        with pytest.raises(ValueError, match="layer 1 does not rotate queries and keys by frequencies"):
            token_means(shown)


def test_position_terms_of_gpt2_are_those_of_transformers_on_equal_tokens():
    """δq·δk of layers 1 and 2, from the hidden states of transformers' GPT-2 for the mean embedding."""
    torch.manual_seed(0)
    theirs = GPT2Model(GPT2Config(vocab_size=50, n_positions=32, n_embd=24, n_layer=2, n_head=3)).eval()
    with torch.no_grad():
        theirs.wpe.weight.mul_(10)
    family = get_family("gpt2")
    sizes = {"n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 3}
    config = family.config_class(vocab_size=50, **sizes, position={"name": "learned", "length": 32})
    ours = family.model_class(config).eval()
    missing = ours.load_state_dict({f"transformer.{n}": x for n, x in theirs.state_dict().items()}, strict=False)
    assert not missing.unexpected_keys
    ids = torch.arange(3, 23)
    with torch.no_grad():
        mean = theirs.wte.weight[3:23].mean(0).expand(1, 20, -1)
        states = theirs(inputs_embeds=mean, output_hidden_states=True).hidden_states
    for number, shown in zip(
        (1, 2), equal_tokens(ours, lambda: model_layers(family_of(ours), ours, ids, (1, 2))), strict=True
    ):
        block = theirs.h[number - 1]
        with torch.no_grad():
            q, k, _ = block.attn.c_attn(block.ln_1(states[number - 1]))[0].double().split(24, dim=-1)
        dq, dk = (x - x.mean(0) for x in (q, k))
        dq, dk = (x.reshape(20, 3, 8).transpose(0, 1) for x in (dq, dk))
        expected = dq @ dk.transpose(1, 2) / 8**0.5
        scores = shown.rows("scores", 0, 19).double()
        seen = torch.ones(20, 20, dtype=torch.bool).tril()
        torch.testing.assert_close(scores[:, seen], expected[:, seen], rtol=1e-3, atol=1e-4)
        assert float(expected.abs().max()) > 0.01
    with torch.no_grad():  # the hook is gone
        first, second = (ours(ids[None].roll(n, dims=1)).logits for n in (0, 1))
    assert not torch.allclose(first, second)
