"""The numbers behind pictures of models: read from the files they are written to, computed again without relpos.maps.

Heat maps of scores and weights, the mass of attention by distance, and its positional part.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from safetensors import safe_open
from typer.testing import CliRunner

import relpos
from relpos.cli import app
from relpos.maps.diagonals import bin_centres, bin_means, distance_edges
from relpos.pictures.draw import draw
from relpos.pictures.mass_figures import COLOURS
from relpos.pictures.picture import AXES, SMALL
from relpos.runs.run import heldout_samples, open_run
from relpos.training.training import train

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("world")]
LENGTH = 16


@pytest.fixture(scope="module")
def runs(world, settings):
    for name in ("rope", "learned", "alibi"):
        train(settings(world / name, model__encoding=name, run__steps=1), lambda text: None)
    return world


@pytest.fixture(scope="module")
def rope(runs):
    return open_run(runs / "rope")


def lines(axes):
    return [line for line in axes.get_lines() if len(line.get_xdata())]


def draw_numbers(*arguments: object) -> dict[str, np.ndarray]:
    """The arrays that `relpos draw … --numbers FILE` writes, without the name of the layer if there is one."""
    words = [str(word) for word in arguments]
    result = CliRunner().invoke(app, ["draw", *words])
    assert result.exit_code == 0, result.output or result.exception
    file = Path(words[-1])
    assert str(file) in result.stdout
    if file.suffix == ".npz":
        with np.load(file) as data:
            arrays, about = {name: data[name] for name in data if name != "about"}, json.loads(str(data["about"]))
    else:
        with safe_open(file, "np") as data:
            arrays, about = {name: data.get_tensor(name) for name in data.keys()}, json.loads(data.metadata()["about"])  # noqa: SIM118
    assert about
    return arrays


def model_scores(run, ids, number):
    """The scores of a layer by relpos.scores, (heads, length, length), −inf where a key is not seen."""
    (call,) = run.family.calls(run.model, ids, [number])
    with torch.no_grad():
        return relpos.scores(call.q, call.k, call.position, **call.arguments)[0].double()


def seen(values: torch.Tensor) -> np.ndarray:
    return values.masked_fill(torch.ones(values.shape[-2:]).triu(1).bool(), torch.nan).numpy()


@pytest.mark.parametrize(("show", "suffix"), [("scores", ".npz"), ("weights", ".safetensors")])
def test_scores_and_weights_of_every_layer_are_in_the_file(rope, tmp_path, show, suffix):
    picture, file = tmp_path / "rope.png", tmp_path / f"rope{suffix}"
    arrays = draw_numbers(
        rope.folder, "--show", show, "--layer", "all", "--head", 1, "--out", picture, "--numbers", file
    )
    ids = heldout_samples(rope, LENGTH, 0, 1)[0].ids
    for number in (1, 2, 3, 4):
        expected = model_scores(rope, ids, number)
        expected = expected.softmax(-1) if show == "weights" else expected
        for name in ("minimum", "mean", "maximum"):
            np.testing.assert_allclose(arrays[f"layer{number}.{name}"], seen(expected), atol=1e-5)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_long_map_is_the_mean_and_the_range_of_its_cells(tmp_path):
    length = 601  # 301 cells of 2 × 2 entries, the last one cut off
    file = tmp_path / "kerple.npz"
    arrays = draw_numbers("kerple_log", "--heads", 2, "--length", length, "--out", file)
    torch.manual_seed(0)
    bias = relpos.encoding("kerple_log", 2, 64).map(length).detach().double()
    entries = np.full((2, 602, 602), np.nan)
    entries[:, :length, :length] = seen(bias)
    cells = entries.reshape(2, 301, 2, 301, 2).swapaxes(2, 3).reshape(2, 301, 301, 4)
    some = np.isfinite(cells).any(-1)
    for name, reduce in (("minimum", np.nanmin), ("mean", np.nanmean), ("maximum", np.nanmax)):
        array = arrays[f"layer1.{name}"]
        np.testing.assert_array_equal(np.isfinite(array), some)
        np.testing.assert_allclose(array[some], reduce(cells[some], axis=-1), atol=1e-5)


def test_profiles_of_several_encodings_carry_their_labels(tmp_path):
    arrays = draw_numbers(
        *("alibi", "kerple_log", "--show", "profile", "--heads", 2, "--length", 64),
        *("--out", tmp_path / "two.png", "--numbers", tmp_path / "two.npz"),
    )
    torch.manual_seed(0)
    for name in ("alibi", "kerple_log"):
        bias = relpos.encoding(name, 2, 64).map(64).detach()
        np.testing.assert_array_equal(arrays[f"{name}.layer1.distances"], np.arange(64))
        for end in ("minimum", "mean", "maximum"):  # the last row has every distance once
            np.testing.assert_allclose(arrays[f"{name}.layer1.profile_{end}"], bias[:, -1].flip(-1), atol=1e-6)


def test_two_encodings_of_one_name_are_told_apart():
    gentle, steep = (relpos.encoding("kerple_log", 2, 8) for _ in range(2))
    torch.nn.init.constant_(next(steep.parameters()), 3.0)
    picture = draw([gentle, steep], show="profile", length=16)
    labels = [text.get_text() for text in picture.figure.legends[0].get_texts()][:2]
    for label, encoding in zip(labels, (gentle, steep), strict=True):
        profile = picture.arrays[f"{label}.layer1.profile_mean"]
        np.testing.assert_allclose(profile, encoding.map(16).detach()[:, -1].flip(-1), atol=1e-6)


class TestMass:
    def test_is_a_mean_over_windows_and_in_the_file(self, rope, tmp_path):
        file = tmp_path / "mass.safetensors"
        arrays = draw_numbers(rope.folder, "--show", "mass", "--layer", "all", "--head", 1, "--out", file)
        samples = heldout_samples(rope, LENGTH, 0, 4)
        weights = torch.stack([model_scores(rope, sample.ids, 3).softmax(-1) for sample in samples]).mean(0).numpy()
        first = weights[:, :, 0].mean(1)
        mass = [weights[:, range(d + 1, LENGTH), range(1, LENGTH - d)].sum(1) / LENGTH for d in range(LENGTH)]
        np.testing.assert_array_equal(arrays["layer3.distances"], np.arange(LENGTH))
        np.testing.assert_allclose(arrays["layer3.mass"], np.stack(mass, 1), atol=1e-6)
        np.testing.assert_allclose(arrays["layer3.first_key"], first, atol=1e-6)
        np.testing.assert_allclose(arrays["layer3.sink"], first, atol=1e-6)
        assert arrays["layer3.fitted_mass"].shape == (12, LENGTH)
        assert len(arrays) == 4 * 5

    def test_of_one_layer_has_the_class_of_each_head(self, rope):
        picture = draw(rope, show="mass", layer=2)
        assert picture.numbers["windows"] == 3  # the held-out text has no more
        assert len(picture.numbers["averaged_with"]) == 2
        assert "on 3 windows of 16 tokens of held-out text" in picture.caption
        for head, axes in zip(picture.classes[0], picture.figure.axes, strict=True):
            assert axes.get_title() == f"Head {head.head}: {head.kind}, sink {100 * head.sink:.0f} %"
            assert to_hex(lines(axes)[0].get_color()).upper() == COLOURS[head.kind]

    def test_of_the_users_text_is_of_one_window(self, rope):
        picture = draw(rope, show="mass", text="word3 and word4 and word5 and word6 and word7", length=12)
        assert (picture.numbers["windows"], picture.numbers["length"]) == (1, 12)

    def test_of_all_layers_is_a_sheet_in_the_colours_of_the_classes_whose_numbers_add_up(self, rope):
        picture = draw(rope, show="mass", layer="all", head=[1, 2, 5])
        kinds = [heads[head].kind for heads in picture.classes for head in (0, 1, 4)]
        drawn = [to_hex(lines(axes)[0].get_color()).upper() for axes in picture.figure.axes]
        assert drawn == [COLOURS[kind] for kind in kinds]
        words = [text.get_text() for text in picture.figure.legends[0].get_texts()]
        assert sum(int(word.split("(")[1][:-1]) for word in words) == len(drawn) == 12
        bars = [axes.patches[0].get_height() for axes in picture.figure.axes]
        assert bars == pytest.approx([heads[head].sink for heads in picture.classes for head in (0, 1, 4)])
        numbers = json.loads(json.dumps(picture.numbers))
        assert sum(numbers["classes"].values()) == 48
        assert numbers["distances"][0] == [0, 0]
        widths = [last - first + 1 for first, last in numbers["distances"]]
        assert sum(widths) == LENGTH
        for head in (head for layer in numbers["layers"] for head in layer["heads"]):
            assert sum(np.multiply(head["mass_per_distance"], widths)) + head["sink"] == pytest.approx(1, abs=1e-5)
            assert head["kind"] in COLOURS

    def test_of_an_encoding_alone_is_that_of_equal_tokens(self):
        picture = draw("alibi", show="mass", heads=4, length=128, log=True)
        assert "of equal tokens" in picture.caption
        assert [head.curve for head in picture.classes[0][:3]] == ["exponential"] * 3


class TestPositionalPart:
    def test_of_rope_is_in_the_file(self, rope, tmp_path):
        file = tmp_path / "position.npz"
        arrays = draw_numbers(rope.folder, "--show", "position", "--layer", 2, "--head", 1, "--out", file)
        arrays = {name.removeprefix("layer2."): array for name, array in arrays.items()}
        scores = np.stack([model_scores(rope, sample.ids, 2).numpy() for sample in heldout_samples(rope, LENGTH, 0, 4)])
        for d in range(LENGTH - 1):
            diagonal = scores[:, :, range(d + 1, LENGTH), range(1, LENGTH - d)]  # (windows, heads, pairs)
            np.testing.assert_allclose(arrays["mean_score"][:, d], diagonal.mean((0, 2)), atol=1e-5)
            np.testing.assert_allclose(arrays["standard_deviation"][:, d], diagonal.std((0, 2)), atol=1e-4)
        angles = arrays["frequencies"][:, None] * arrays["distances"] + arrays["phase"][:, :, None]
        kernel = arrays["constant"][:, None] + (arrays["amplitude"][:, :, None] * np.cos(angles)).sum(1)
        np.testing.assert_allclose(arrays["kernel"], kernel, atol=1e-9)

    def test_of_rope_is_drawn_with_its_terms(self, rope):
        picture = draw(rope, show="position", layer=3, head=[4])
        upper, lower, _ = picture.figure.axes  # scores, terms, colour bar
        head = picture.numbers["layers"][0]["heads"][3]
        angles = (
            np.array(picture.numbers["frequencies"])[:, None] * np.arange(LENGTH) + np.array(head["phase"])[:, None]
        )
        terms = np.array(head["amplitude"])[:, None] * np.cos(angles)
        np.testing.assert_allclose(lines(upper)[1].get_ydata(), head["constant"] + terms.sum(0), atol=1e-9)
        np.testing.assert_allclose(lower.collections[0].get_array(), terms - terms[:, :1], atol=1e-9)
        np.testing.assert_allclose(lines(upper)[0].get_ydata()[:15], picture.arrays["layer3.mean_score"][3, :15])
        assert len(head["mean_score"]) == len(picture.numbers["distances"])
        json.dumps(picture.numbers)

    def test_of_learned_positions_is_a_map(self, runs):
        picture = draw(runs / "learned", show="position", layer=1)
        assert picture.numbers["shows"] == "position"
        assert picture.maps[0].mean.shape == (12, 16, 16)
        np.testing.assert_array_equal(picture.arrays["layer1.mean"], picture.maps[0].mean)
        assert "position–position term" in picture.caption
        sheet = draw(runs / "learned", show="position", layer="all").figure
        assert len([axes for axes in sheet.axes if axes.images]) == 48

    def test_of_a_bias_is_its_profile(self, runs):
        picture, profile = (draw(runs / "alibi", show=show) for show in ("position", "profile"))
        assert picture.caption == profile.caption
        np.testing.assert_array_equal(picture.maps[0].profile, profile.maps[0].profile)
        bias = relpos.encoding("alibi", 12, 16).map(16)
        np.testing.assert_allclose(picture.arrays["layer4.mean"], bias.masked_fill(bias.isinf(), torch.nan), atol=1e-6)
        np.testing.assert_allclose(picture.arrays["layer4.profile_mean"], bias[:, -1].flip(-1), atol=1e-6)
        assert draw("rope", show="position", length=32).maps[0].show == "scores"


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


def test_json_has_small_arrays_and_the_names_of_large_ones(tmp_path):
    picture = draw("alibi", heads=2, length=64, show="weights")
    about = json.loads(picture.save(tmp_path / "alibi.json").read_text())
    assert set(about["arrays"]) == set(picture.arrays)
    for name, entry in about["arrays"].items():
        array = picture.arrays[name]
        assert entry["shape"] == list(array.shape)
        assert len(entry["axes"]) == array.ndim
        assert (entry["values"] is None) == (array.size > SMALL)
        if entry["values"] is not None:
            np.testing.assert_array_equal(np.array(entry["values"], dtype=array.dtype), array)
    assert about["arrays"]["layer1.mean"]["values"] is None
    small = json.loads(draw("alibi", heads=2, length=4).save(tmp_path / "small.json").read_text())
    assert small["arrays"]["layer1.mean"]["values"][0][0] == [0.0, None, None, None]  # no key after the query


def test_the_documentation_names_every_array_with_its_axes():
    page = (Path(__file__).parents[2] / "docs" / "figures.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("|")]
    for name, axes in AXES.items():
        assert any(f"`{name}`" in row and f"| ({', '.join(axes)}) |" in row for row in rows), name


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [2, 9, 1000])
def test_bins_hold_every_distance_once(length, causal, log):
    edges = distance_edges(length, log, causal)
    lowest = 0 if causal else 1 - length
    assert (edges[0], edges[-1]) == (lowest, length)
    assert (np.diff(edges) > 0).all()
    values = np.random.default_rng(0).normal(size=length - lowest)
    expected = [values[first - lowest : end - lowest].mean() for first, end in itertools.pairwise(edges)]
    np.testing.assert_allclose(bin_means(values, edges, lowest), expected)
    centres = bin_centres(edges, log)
    assert ((edges[:-1] <= centres) & (centres <= edges[1:] - 1)).all()
