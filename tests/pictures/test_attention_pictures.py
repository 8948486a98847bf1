"""relpos draw --show mass and --show position: what is drawn, which numbers are written, and what is refused."""

import itertools
import json

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from typer.testing import CliRunner

import relpos
from relpos.cli import app
from relpos.maps.bins import bin_centres, bin_means, distance_edges
from relpos.maps.heads.mass_profiles import layer_mass
from relpos.maps.layer import model_layers
from relpos.pictures.draw import draw
from relpos.pictures.mass_figures import COLOURS
from relpos.runs.run import heldout_samples, open_run
from relpos.training.training import train

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("world")]


@pytest.fixture(scope="module")
def runs(world, settings):
    for name in ("rope", "learned", "alibi"):
        train(settings(world / name, model__encoding=name, run__steps=3), lambda text: None)
    return world


@pytest.fixture(scope="module")
def rope(runs):
    return open_run(runs / "rope")


def lines(axes):
    return [line for line in axes.get_lines() if len(line.get_xdata())]


def test_the_mass_is_a_mean_over_windows_of_held_out_text(rope):
    picture = draw(rope, show="mass", layer=2)
    samples = heldout_samples(rope, 16, 0, 4)
    expected = torch.stack(
        [layer_mass(model_layers(rope.family, rope.model, s.ids, [2])[0]).by_distance for s in samples]
    ).mean(0)
    torch.testing.assert_close(picture.profiles[0].by_distance, expected)
    assert picture.numbers["windows"] == len(samples) == 3  # the held-out text has no more
    assert len(picture.numbers["averaged_with"]) == 2
    assert "on 3 windows of 16 tokens of held-out text" in picture.caption
    for head, axes in zip(picture.classes[0], picture.figure.axes, strict=True):
        assert axes.get_title() == f"Head {head.head}: {head.kind}, sink {100 * head.sink:.0f} %"
        assert to_hex(lines(axes)[0].get_color()).upper() == COLOURS[head.kind]


def test_the_text_of_the_user_is_the_only_window(runs):
    picture = draw(runs / "rope", show="mass", text="word3 and word4 and word5 and word6 and word7", length=12)
    assert (picture.numbers["windows"], picture.numbers["length"]) == (1, 12)


def test_the_numbers_add_up_and_are_json(rope):
    numbers = json.loads(json.dumps(draw(rope, show="mass", layer="all").numbers))
    assert sum(numbers["classes"].values()) == 48
    assert numbers["distances"][0] == [0, 0]
    widths = [last - first + 1 for first, last in numbers["distances"]]
    assert sum(widths) == 16
    for layer in numbers["layers"]:
        for head in layer["heads"]:
            mass = sum(np.multiply(head["mass_per_distance"], widths))
            assert mass + head["sink"] == pytest.approx(1, abs=1e-5)
            assert head["kind"] in COLOURS


def test_a_contact_sheet_has_every_head_in_the_colour_of_its_class(rope):
    picture = draw(rope, show="mass", layer="all", head=[1, 2, 5])
    assert len(picture.figure.axes) == 12
    kinds = [heads[head].kind for heads in picture.classes for head in (0, 1, 4)]
    assert [to_hex(lines(axes)[0].get_color()).upper() for axes in picture.figure.axes] == [COLOURS[k] for k in kinds]
    words = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert sum(int(word.split("(")[1][:-1]) for word in words) == 12
    bars = [axes.patches[0].get_height() for axes in picture.figure.axes]
    assert bars == pytest.approx([heads[head].sink for heads in picture.classes for head in (0, 1, 4)])


def test_an_encoding_alone_has_a_mass_too():
    picture = draw("alibi", show="mass", heads=4, length=128, log=True)
    assert "of equal tokens" in picture.caption
    assert [head.curve for head in picture.classes[0][:3]] == ["exponential"] * 3


def test_the_positional_part_of_rope_is_drawn_with_its_terms(rope):
    picture = draw(rope, show="position", layer=3, head=[4])
    upper, lower, _ = picture.figure.axes  # scores, terms, colour bar
    head = picture.numbers["layers"][0]["heads"][3]
    frequencies = np.array(picture.numbers["frequencies"])
    distances = np.arange(16)
    terms = np.array(head["amplitude"])[:, None] * np.cos(
        frequencies[:, None] * distances + np.array(head["phase"])[:, None]
    )
    total = head["constant"] + terms.sum(0)
    drawn = lines(upper)
    np.testing.assert_allclose(drawn[1].get_ydata(), total, atol=1e-9)
    np.testing.assert_allclose(lower.collections[0].get_array(), terms - terms[:, :1], atol=1e-9)
    layers = [model_layers(rope.family, rope.model, s.ids, [3])[0] for s in heldout_samples(rope, 16, 0, 4)]
    scores = np.stack([layer.rows("scores", 0, 15)[3].double().numpy() for layer in layers])
    means = [np.mean([scores[:, i, i - d] for i in range(d + 1, 16)]) for d in range(15)]
    np.testing.assert_allclose(drawn[0].get_ydata()[:15], means, atol=1e-9)
    assert len(head["mean_score"]) == len(picture.numbers["distances"])
    json.dumps(picture.numbers)


def test_the_positional_part_of_learned_positions_is_a_map(runs):
    picture = draw(runs / "learned", show="position", layer=1)
    assert picture.numbers["shows"] == "position"
    assert picture.maps[0].mean.shape == (12, 16, 16)
    np.testing.assert_array_equal(picture.arrays["layer1.mean"], picture.maps[0].mean)
    assert "position–position term" in picture.caption
    assert len([axes for axes in draw(runs / "learned", show="position", layer="all").figure.axes if axes.images]) == 48


def test_the_positional_part_of_a_bias_is_its_profile(runs):
    picture, profile = (draw(runs / "alibi", show=show) for show in ("position", "profile"))
    assert picture.caption == profile.caption
    np.testing.assert_array_equal(picture.maps[0].profile, profile.maps[0].profile)
    bias = relpos.encoding("alibi", 12, 16).map(16)
    np.testing.assert_allclose(picture.arrays["layer4.mean"], bias.masked_fill(bias.isinf(), torch.nan), atol=1e-6)
    np.testing.assert_allclose(picture.arrays["layer4.profile_mean"], bias[:, -1].flip(-1), atol=1e-6)
    assert draw("rope", show="position", length=32).maps[0].show == "scores"


def test_the_command_writes_pictures_and_numbers(runs, tmp_path):
    for name in ("mass.png", "mass.json"):
        arguments = ["draw", str(runs / "rope"), "--show", "mass", "--log", "--out", str(tmp_path / name)]
        assert CliRunner().invoke(app, arguments).exit_code == 0
    assert (tmp_path / "mass.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "mass.json").read_text())["shows"] == "mass"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"show": "mass", "length": 4}, "4 tokens are too few to class heads by distance"),
        ({"show": "mass", "shared_scale": True}, "no colours to share"),
        ({"show": "mass", "label_tokens": True}, "tokens can be named on the heat maps"),
        ({"show": "position", "layer": "all"}, "give one layer, not all"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(rope, options, words):
    with pytest.raises(ValueError, match=words):
        draw(rope, **options)


def test_several_encodings_have_no_common_mass():
    with pytest.raises(ValueError, match="as profiles only"):
        draw(["alibi", "rope"], show="mass")


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [2, 9, 1000])
def test_bins_hold_every_distance_once(length, causal, log):
    edges = distance_edges(length, log, causal)
    lowest = 0 if causal else 1 - length
    assert (edges[0], edges[-1]) == (lowest, length)
    assert (np.diff(edges) > 0).all()
    values = np.random.default_rng(0).normal(size=length - lowest)
    means = bin_means(values, edges, lowest)
    expected = [values[first - lowest : end - lowest].mean() for first, end in itertools.pairwise(edges)]
    np.testing.assert_allclose(means, expected)
    centres = bin_centres(edges, log)
    assert ((edges[:-1] <= centres) & (centres <= edges[1:] - 1)).all()
