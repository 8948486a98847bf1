"""Tensors that someone already has: what is read from them, drawn, explored and refused."""

import numpy as np
import pytest
import torch
from explorer import client, get_tile, reduced_tile

import relpos
from relpos.explorer.scenes import ExplorerSubject
from relpos.maps.subject import TensorSubject

HIDDEN = torch.ones(20, 20).triu(1).bool()


def weights(layers=2, heads=3):
    torch.manual_seed(0)
    scores = torch.randn(layers, heads, 20, 20).masked_fill(HIDDEN, -torch.inf)
    return scores.softmax(-1).masked_fill(HIDDEN, torch.nan)


@pytest.mark.parametrize("kind", ["torch", "numpy", "layers", "attentions", "half"])
def test_every_kind_of_tensor_is_drawn_with_its_values(kind):
    values = weights()
    given = {
        "torch": values.requires_grad_(),
        "numpy": values.detach().numpy(),
        "layers": list(values),
        "attentions": tuple(layer[None] for layer in values),  # as transformers returns them
        "half": values.bfloat16(),
    }[kind]
    picture = relpos.draw(given, show="weights", layer=1)
    (drawn,) = picture.maps
    expected = values[0].detach()
    np.testing.assert_allclose(drawn.mean, expected, atol=1e-7 if kind != "half" else 2e-3)
    assert (drawn.show, drawn.layer, drawn.causal) == ("weights", 1, True)
    assert "the attention weights of 20 tokens" in picture.caption


def test_tokens_name_the_axes_and_a_space_is_a_token():
    words = [" ", *(f"w{n}" for n in range(19))]
    panel = relpos.draw(weights()[0], show="weights", tokens=words, head=[2]).figure.axes[0]
    shown = [label.get_text() for label in panel.get_xticklabels()]
    assert shown == ["·", *words[1:]]
    assert len(relpos.draw(weights(), show="weights", layer="all").maps) == 2


def test_the_explorer_shows_a_tensor_and_its_tokens():
    values = weights()
    web = client(ExplorerSubject("0", TensorSubject(values, "weights", [f"w{n}" for n in range(20)])))
    scene = web.post("/api/scenes", json={"subject": "0"}).json()
    assert (scene["shows"], scene["length"], scene["layers"], scene["heads"]) == (["weights"], 20, 2, 3)
    tile = get_tile(web, scene, "weights", 2, 3, 0, 0, 0)
    np.testing.assert_allclose(tile, reduced_tile(values[1, 2].numpy(), 0, 0, 0), atol=1e-7)
    head = web.get(f"/api/scenes/{scene['scene']}/head/2/3?show=weights").json()
    assert head["log"]
    assert head["class"]["sink"] == pytest.approx(float(values[1, 2, :, 0].mean()), abs=1e-6)
    assert head["profile"]["mean"][3] == pytest.approx(float(values[1, 2].diagonal(-3).mean()), rel=1e-5)
    lines = web.get(f"/api/scenes/{scene['scene']}/overview").text.splitlines()
    assert len(lines) == 2
    tokens = web.get(f"/api/scenes/{scene['scene']}/tokens").json()
    assert tokens["tokens"][:2] == ["w0", "w1"]
    assert web.post("/api/scenes", json={"subject": "0", "length": 30}).status_code == 400


def test_rows_that_sum_to_one_are_weights_and_anything_else_is_scores():
    unseen = weights()
    unseen[0, 0, 3] = torch.nan  # a row that sees nothing
    for values in (weights(), unseen, weights().nan_to_num(0.0), weights().bfloat16(), weights()[0, 0]):
        assert TensorSubject(values, None, None).default_show == "weights"
    negative = torch.eye(4).expand(1, 4, 4) + torch.tensor([1.0, -1.0, 0.0, 0.0])
    for values in (torch.randn(3, 4, 4), negative, torch.zeros(1, 4, 4), 2 * weights()):
        assert TensorSubject(values, None, None).default_show == "scores"
    assert TensorSubject(weights(), "bias", None).default_show == "bias"
    assert relpos.draw(weights()[0, 0]).maps[0].show == "weights"


def test_zeros_after_every_query_of_weights_are_a_causal_mask():
    zeros = weights().nan_to_num(0.0)
    masked, as_scores = TensorSubject(zeros, "weights", None), TensorSubject(zeros, "scores", None)
    assert (masked.causal, as_scores.causal) == (True, False)
    expected = weights()[1, 2]
    torch.testing.assert_close(masked.head_values[1][2].block(0, 20, 0, 20), expected, equal_nan=True)
    zeros[1, 1, 3, 4] = 0.1
    assert not TensorSubject(zeros, "weights", None).causal


@pytest.mark.parametrize(
    ("values", "options", "sentence"),
    [
        (torch.randn(3, 4, 4), {"show": "profile"}, "unknown kind of values of a tensor 'profile'"),
        (torch.randn(4), {"show": "bias"}, r"shape \(4,\) cannot be drawn: give \(tokens, tokens\), \(heads"),
        (torch.randn(3, 4, 5), {"show": "bias"}, r"shape \(1, 3, 4, 5\)"),
        (torch.randn(2, 3, 0, 0), {"show": "bias"}, "cannot be drawn"),
        ([torch.randn(3, 4, 4), torch.randn(3, 5, 5)], {"show": "bias"}, "layers of the shapes"),
        (torch.full((2, 4, 4), torch.nan), {"show": "bias"}, "head 1 of layer 1 has no finite value"),
        (torch.randn(3, 4, 4), {"show": "bias", "tokens": ["a"]}, "1 names for 4 tokens"),
        (torch.randn(3, 4, 4), {"show": "bias", "length": 8}, "length is not for a tensor"),
        (torch.randn(3, 4, 4), {"show": "bias", "causal": False}, "causal is not for a tensor"),
        (torch.randn(3, 4, 4), {"show": "bias", "head": [4]}, "there is no head 4"),
        (torch.randn(3, 4, 4), {"show": "bias", "layer": 2}, "there is no layer 2"),
        ("alibi", {"tokens": ["a"]}, "names of a tensor's tokens"),
        ((), {}, 'set_attn_implementation."eager"'),  # what transformers returns where attention is fused
        ((None, None), {}, 'set_attn_implementation."eager"'),
    ],
)
def test_what_cannot_be_drawn_gets_a_sentence(values, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        relpos.draw(values, **options)


def test_what_is_not_a_number_is_refused():
    with pytest.raises(TypeError, match="holds no numbers"):
        relpos.draw(np.array([[["a"]]]), show="bias")
    with pytest.raises(TypeError, match="real numbers"):
        relpos.draw(torch.zeros(1, 2, 2, dtype=torch.complex64), show="bias")
    with pytest.raises(ValueError, match="for a tensor"):
        relpos.explore("alibi", tokens=["a"])
    for nothing in ((), (None, None)):
        with pytest.raises(ValueError, match=r'set_attn_implementation."eager"'):
            relpos.explore(nothing, tokens=["a"])
