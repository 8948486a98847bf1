"""Encodings in the explorer: their sliders, and scenes with the values of these sliders."""

import base64
import json

import numpy as np
import pytest
import torch
from explorer import client, get_tile, levels, make_scene, reduced_tile

import relpos
from relpos.encodings import registry
from relpos.explorer.gallery_entries import gallery_entry
from relpos.explorer.sliders import make_encoding, sliders
from relpos.forms.bias import Toeplitz
from relpos.maps.map import map_of_layer
from relpos.pictures.colours import head_scales


@pytest.fixture(scope="module")
def web():
    return client()


def by_name(name):
    return {slider["name"]: slider for slider in sliders(name, 8, 64)}


def value(web, scene, *place):
    return web.get(f"/api/scenes/{scene['scene']}/value/{'/'.join(map(str, place))}").json()["value"]


@pytest.mark.parametrize("name", relpos.names())
def test_every_slider_can_be_set_to_its_own_value_and_to_its_ends(name):
    for slider in sliders(name, 4, 64):
        ends = slider["choices"] if slider["kind"] == "choice" else [slider["low"], slider["high"], slider["value"]]
        for end in ends:
            make_encoding(name, 4, 64, {slider["name"]: end})


def test_the_sliders_of_the_issue_exist():
    assert by_name("alibi")["slopes_values"]["kind"] == "per_head"
    assert {"r1", "r2"} <= set(by_name("kerple_log"))
    assert {"c_values", "length"} <= set(by_name("fire"))  # c, and the threshold
    assert {"base", "factor", "scaling"} <= set(by_name("rope"))  # theta
    assert by_name("window")["size"]["kind"] == "int"


def test_moved_sliders_of_kerple_are_its_formula(web):
    r1, r2 = [0.5, 2.0, 1.0], [0.1, 0.7, 3.0]
    scene = make_scene(web, subject=None, encoding="kerple_log", length=100, heads=3, parameters={"r1": r1, "r2": r2})
    distance = np.arange(100)[:, None] - np.arange(100)
    for head in range(3):
        dense = np.where(distance >= 0, -r1[head] * np.log1p(r2[head] * np.maximum(distance, 0)), np.nan)
        ours = get_tile(web, scene, "bias", 1, head + 1, 0, 0, 0)
        np.testing.assert_allclose(ours, reduced_tile(dense, 0, 0, 0), rtol=1e-4, atol=1e-4)


def test_options_and_lists_are_set_too(web):
    sizes = {"subject": None, "length": 10, "heads": 2}
    scene = make_scene(web, **sizes, encoding="alibi", parameters={"slopes_values": [1.0, 3.0]})
    assert value(web, scene, "bias", 1, 2, 9, 4) == -15.0
    scene = make_scene(web, **sizes, encoding="window", parameters={"size": 3})
    assert value(web, scene, "bias", 1, 2, 9, 7) == 0.0
    assert value(web, scene, "bias", 1, 2, 9, 6) is None


@pytest.mark.parametrize("causal", [True, False])
def test_scores_of_rope_and_their_softmax_are_those_of_equal_tokens(web, causal):
    request = {"encoding": "rope", "length": 600, "heads": 3, "causal": causal, "parameters": {"base": 1_000_000}}
    scene = make_scene(web, subject=None, **request)
    torch.manual_seed(0)
    q = torch.randn(192).view(1, 3, 1, 64).expand(1, 3, 600, 64)
    scores = relpos.scores(q, q, relpos.encoding("rope", 3, 64, base=1e6), causal=causal)[0, 2].double()
    hidden = scores == -torch.inf
    for show, dense, atol in (("scores", scores, 2e-4), ("flat", scores.softmax(-1), 1e-6)):
        values = dense.masked_fill(hidden, torch.nan).numpy()
        for level in levels(600):
            ours = get_tile(web, scene, show, 1, 3, level, 0, 0)
            np.testing.assert_allclose(ours, reduced_tile(values, level, 0, 0), rtol=2e-3, atol=atol)


@pytest.mark.parametrize("name", ["cable", "fire", "cope", "sinusoidal"])  # of every kind; none tracks gradients
def test_rows_and_values_are_those_of_the_tile(web, name):
    scene = make_scene(web, subject=None, encoding=name, length=70, heads=2)
    for show in scene["shows"]:
        tile = get_tile(web, scene, show, 1, 2, 0, 0, 0)
        row = web.get(f"/api/scenes/{scene['scene']}/row/{show}/1/2/50").json()
        assert row["mean"][:51] == pytest.approx(tile[1, 50, :51].tolist(), rel=1e-4, abs=1e-6)
        assert row["mean"][51:] == [None] * 19
        assert value(web, scene, show, 1, 2, 50, 7) == pytest.approx(tile[1, 50, 7], abs=1e-5)
        assert value(web, scene, show, 1, 2, 7, 50) is None


def test_a_difference_is_that_of_two_scenes(web):
    scenes = [make_scene(web, subject=None, encoding=name, length=300, heads=2, seed=1) for name in ("t5", "fire")]
    tiles = [get_tile(web, scene, "bias", 1, 2, 0, 1, 0) for scene in scenes]
    base = f"/api/difference/{scenes[0]['scene']}/{scenes[1]['scene']}"
    ours = np.frombuffer(web.get(f"{base}/tiles/bias/1/2/1/2/0/1/0").content, "<f4").reshape(3, 256, 256)
    np.testing.assert_allclose(ours[1], tiles[0][1] - tiles[1][1], atol=1e-5)
    span = web.get(f"{base}/head/bias/1/2/1/2").json()
    assert span["low"] <= np.nanmin(ours) <= np.nanmax(ours) <= span["high"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("window", {"size": 0}),
        ("window", {"size": 10**9}),
        ("fire", {"units": 10**12}),
        ("rope", {"scaling": "none"}),
        ("rope", {"rope_parameters": 3}),
        ("t5", {"buckets": 30}),
        ("sum", {"parts": "alibi"}),
    ],
)
def test_values_out_of_range_are_refused(name, parameters):
    with pytest.raises(ValueError, match=r"\.$"):
        make_encoding(name, 4, 64, parameters)


def test_a_new_encoding_has_its_sliders_without_a_line_in_the_explorer(web, monkeypatch):
    class Saturating(relpos.Encoding):
        """A penalty that saturates.

        Args:
            heads: Number of attention heads.
            head_dim: Size of a head.
            reach: Distance at which half of the penalty is reached.
        """

        paper, formula = "none", "B_ij = −d / (d + reach)"

        def __init__(self, heads: int, head_dim: int, *, reach: float = 16.0) -> None:
            super().__init__(heads, head_dim)
            self.reach = reach
            self.strength = torch.nn.Parameter(torch.ones(heads))

        def bias(self, call):
            distance = call.distances.abs()
            return Toeplitz(-self.strength[:, None] * distance / (distance + self.reach), call.zero)

    monkeypatch.setattr(registry, "_registered", {})
    relpos.register("saturating", Saturating)
    assert by_name("saturating")["reach"]["help"] == "Distance at which half of the penalty is reached."
    assert by_name("saturating")["strength"]["kind"] == "per_head"
    assert "saturating" in [card["name"] for card in web.get("/api/start").json()["encodings"]]
    values = {"reach": 4, "strength": [1, 2]}
    scene = make_scene(web, subject=None, encoding="saturating", length=20, heads=2, parameters=values)
    assert value(web, scene, "bias", 1, 2, 12, 0) == pytest.approx(-1.5)


@pytest.mark.parametrize("name", relpos.names())
def test_no_two_sliders_of_an_encoding_have_the_same_words(name):
    shown = [f"{slider['label']}{' of head 1' * (slider['kind'] == 'per_head')}" for slider in sliders(name, 12, 64)]
    assert len(set(shown)) == len(shown)
    assert len({slider["label"] for slider in sliders(name, 12, 64)}) == len(shown)


@pytest.mark.parametrize("name", ["alibi", "clipped", "fire", "rope", "cable"])
def test_all_heads_of_a_page_have_the_colour_map_of_the_figures(web, name):
    scene = make_scene(web, encoding=name, length=64)
    assert scene["heads"] == 12  # as many as relpos draw has
    show = scene["default_show"]
    reply = web.get(f"/api/scenes/{scene['scene']}/overview?show={show}").text
    heads = json.loads(reply)["heads"]
    details = [web.get(f"/api/scenes/{scene['scene']}/head/1/{n}?show={show}&mass=0").json() for n in range(1, 13)]
    layer = web.explorer.scene(scene["scene"]).view.layer(show, 1)
    (scales,) = head_scales([map_of_layer(layer, show, pixels=64)], range(12), shared=False)  # of all entries
    assert {one["colour_map"] for one in (*heads, *details)} == {scale.colour_map for scale in scales}


def test_a_map_beside_one_of_one_sign_has_its_colours(web):
    scene = make_scene(web, encoding="clipped", length=64)
    place = f"/api/scenes/{scene['scene']}/head/1/1?mass=0"
    own, plain = (web.get(place + colours).json() for colours in ("", "&colours=plain"))
    assert own["both_signs"] is plain["both_signs"] is True
    assert (own["colour_map"], plain["colour_map"]) == ("diverging", "sequential")
    assert plain["scale"]["high"] == pytest.approx(plain["high"])
    assert own["scale"]["low"] == -own["scale"]["high"]


def test_small_maps_are_as_fine_as_they_are_asked_for(web):
    scene = make_scene(web, encoding="alibi", length=256)
    for side in (48, 144):
        reply = web.get(f"/api/scenes/{scene['scene']}/overview?side={side}").json()
        codes = np.frombuffer(base64.b64decode(reply["heads"][0]["map"]), np.uint8).reshape(side, side)
        assert (codes[np.triu_indices(side, 2)] == 0).all()
        assert 0 < codes[side - 1, 0] < 10
        assert codes[side - 1, side - 1] > 250
    assert web.get(f"/api/scenes/{scene['scene']}/overview?side=999").status_code == 400


def test_the_gallery_has_the_profiles_of_an_encoding():
    alibi = gallery_entry("alibi")
    for head, profile in zip(alibi["heads"], alibi["profiles"], strict=True):
        np.testing.assert_allclose(profile, -(2.0 ** (-8 * head / 12)) * np.array(alibi["distance"]), rtol=1e-5)
