"""The sliders are derived from the encodings, and a scene with moved sliders is the encoding with these values."""

import numpy as np
import pytest
import torch
from explorer import client, get_tile, make_scene, reduced_tile

import relpos
from relpos.encodings import registry
from relpos.explorer.sliders import make_encoding, sliders
from relpos.forms.bias import Toeplitz


def by_name(name, heads=8):
    return {slider["name"]: slider for slider in sliders(name, heads, 64)}


@pytest.mark.parametrize("name", relpos.names())
def test_every_slider_can_be_set_to_its_own_value_and_to_its_ends(name):
    for slider in sliders(name, 4, 64):
        ends = slider["choices"] if slider["kind"] == "choice" else [slider["low"], slider["high"], slider["value"]]
        for value in ends:
            make_encoding(name, 4, 64, {slider["name"]: value})


def test_the_sliders_of_the_issue_exist():
    assert by_name("alibi")["slopes_values"]["kind"] == "per_head"
    assert {"r1", "r2"} <= set(by_name("kerple_log"))
    assert {"c_values", "length"} <= set(by_name("fire"))  # c, and the threshold
    assert {"base", "factor", "scaling"} <= set(by_name("rope"))  # theta
    assert by_name("window")["size"]["kind"] == "int"


def test_kerple_with_moved_sliders_is_its_formula():
    web = client()
    r1, r2 = [0.5, 2.0, 1.0], [0.1, 0.7, 3.0]
    scene = make_scene(web, subject=None, encoding="kerple_log", length=100, heads=3, parameters={"r1": r1, "r2": r2})
    distance = np.arange(100)[:, None] - np.arange(100)
    for head in range(3):
        dense = np.where(distance >= 0, -r1[head] * np.log1p(r2[head] * np.maximum(distance, 0)), np.nan)
        ours = get_tile(web, scene, "bias", 1, head + 1, 0, 0, 0)
        np.testing.assert_allclose(ours, reduced_tile(dense, 0, 0, 0), rtol=1e-4, atol=1e-4)


def test_options_and_lists_are_set_too():
    web = client()
    scene = make_scene(
        web, subject=None, encoding="alibi", length=10, heads=2, parameters={"slopes_values": [1.0, 3.0]}
    )
    assert web.get(f"/api/scenes/{scene['scene']}/value/bias/1/2/9/4").json()["value"] == -15.0
    scene = make_scene(web, subject=None, encoding="window", length=10, heads=2, parameters={"size": 3})
    assert web.get(f"/api/scenes/{scene['scene']}/value/bias/1/2/9/7").json()["value"] == 0.0
    assert web.get(f"/api/scenes/{scene['scene']}/value/bias/1/2/9/6").json()["value"] is None
    slow = make_scene(web, subject=None, encoding="rope", length=50, heads=1, parameters={"base": 1_000_000})
    torch.manual_seed(0)
    q = torch.randn(64).view(1, 1, 1, 64).expand(1, 1, 50, 64)
    expected = relpos.scores(q, q, relpos.encoding("rope", 1, 64, base=1e6))[0, 0, 40, 3]
    value = web.get(f"/api/scenes/{slow['scene']}/value/scores/1/1/40/3").json()["value"]
    assert value == pytest.approx(float(expected), abs=1e-4)


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


def test_a_new_encoding_has_its_sliders_without_a_line_in_the_explorer(monkeypatch):
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
    named = by_name("saturating")
    assert named["reach"]["help"] == "Distance at which half of the penalty is reached."
    assert named["strength"]["kind"] == "per_head"
    web = client()
    assert "saturating" in [each["name"] for each in web.get("/api/start").json()["encodings"]]
    scene = make_scene(
        web, subject=None, encoding="saturating", length=20, heads=2, parameters={"reach": 4, "strength": [1, 2]}
    )
    assert web.get(f"/api/scenes/{scene['scene']}/value/bias/1/2/12/0").json()["value"] == pytest.approx(-1.5)
