"""The numbers behind every picture: read from the files they are written to, and computed again without view."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

import relpos
from relpos.cli import app
from relpos.pictures.draw import draw
from relpos.pictures.picture import AXES, SMALL
from relpos.runs.run import heldout_samples, open_run
from relpos.training.training import train

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("world")]
LENGTH = 16


@pytest.fixture(scope="module")
def rope(world, settings):
    train(settings(world / "rope", model__encoding="rope", run__steps=1), lambda text: None)
    return open_run(world / "rope")


def read(file: Path) -> tuple[dict[str, np.ndarray], dict]:
    """The arrays of a file, and what it says about the picture."""
    if file.suffix == ".npz":
        with np.load(file) as data:
            return {name: data[name] for name in data if name != "about"}, json.loads(str(data["about"]))
    with safe_open(file, "np") as data:
        return {name: data.get_tensor(name) for name in data.keys()}, json.loads(data.metadata()["about"])  # noqa: SIM118


def draw_numbers(*arguments: object) -> dict[str, np.ndarray]:
    """The arrays that `relpos draw … --numbers FILE` writes."""
    words = [str(word) for word in arguments]
    result = CliRunner().invoke(app, ["draw", *words])
    assert result.exit_code == 0, result.output or result.exception
    arrays, about = read(Path(words[-1]))
    assert str(Path(words[-1])) in result.stdout
    assert about
    return arrays


def model_scores(run, ids, number):
    """The scores of a layer by relpos.scores, (heads, length, length), −inf where a key is not seen."""
    (call,) = run.family.calls(run.model, ids, [number])
    with torch.no_grad():
        return relpos.scores(call.q, call.k, call.position, **call.arguments)[0].double()


def seen(values: torch.Tensor) -> np.ndarray:
    return values.masked_fill(torch.ones(values.shape[-2:]).triu(1).bool(), torch.nan).numpy()


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("show", ["scores", "weights"])
def test_scores_and_weights_of_a_model_are_in_the_file(rope, tmp_path, show, suffix):
    picture, file = tmp_path / "rope.png", tmp_path / f"rope{suffix}"
    arrays = draw_numbers(rope.folder, "--show", show, "--layer", 2, "--head", 1, "--out", picture, "--numbers", file)
    expected = model_scores(rope, heldout_samples(rope, LENGTH, 0, 1)[0].ids, 2)
    expected = expected.softmax(-1) if show == "weights" else expected
    for name in ("minimum", "mean", "maximum"):
        np.testing.assert_allclose(arrays[f"layer2.{name}"], seen(expected), atol=1e-5)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_contact_sheet_has_the_arrays_of_every_layer(rope, tmp_path):
    file = tmp_path / "sheet.npz"
    arrays = draw_numbers(rope.folder, "--show", "weights", "--layer", "all", "--head", 2, "--out", file)
    ids = heldout_samples(rope, LENGTH, 0, 1)[0].ids
    for number in (1, 2, 3, 4):
        expected = seen(model_scores(rope, ids, number).softmax(-1))
        np.testing.assert_allclose(arrays[f"layer{number}.mean"], expected, atol=1e-6)


def test_a_long_map_is_the_mean_and_the_range_of_its_cells(tmp_path):
    length = 601  # 301 cells of 2 × 2 entries, the last one cut off
    arrays = draw_numbers(
        *("kerple_log", "--heads", 2, "--length", length),
        *("--out", tmp_path / "kerple.png", "--numbers", tmp_path / "kerple.npz"),
    )
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


def test_two_runs_of_one_name_are_told_apart():
    gentle, steep = (relpos.encoding("kerple_log", 2, 8) for _ in range(2))
    torch.nn.init.constant_(next(steep.parameters()), 3.0)
    picture = draw([gentle, steep], show="profile", length=16)
    labels = [text.get_text() for text in picture.figure.legends[0].get_texts()][:2]
    for label, encoding in zip(labels, (gentle, steep), strict=True):
        profile = picture.arrays[f"{label}.layer1.profile_mean"]
        np.testing.assert_allclose(profile, encoding.map(16).detach()[:, -1].flip(-1), atol=1e-6)


def test_the_mass_is_in_the_file(rope, tmp_path):
    arrays = draw_numbers(
        *(rope.folder, "--show", "mass", "--layer", "all", "--head", 1),
        *("--out", tmp_path / "mass.png", "--numbers", tmp_path / "mass.safetensors"),
    )
    windows = [model_scores(rope, sample.ids, 3).softmax(-1) for sample in heldout_samples(rope, LENGTH, 0, 4)]
    weights = torch.stack(windows).mean(0).numpy()  # (heads, queries, keys)
    first = weights[:, :, 0].mean(1)
    mass = [weights[:, range(d + 1, LENGTH), range(1, LENGTH - d)].sum(1) / LENGTH for d in range(LENGTH)]
    np.testing.assert_array_equal(arrays["layer3.distances"], np.arange(LENGTH))
    np.testing.assert_allclose(arrays["layer3.mass"], np.stack(mass, 1), atol=1e-6)
    np.testing.assert_allclose(arrays["layer3.first_key"], first, atol=1e-6)
    np.testing.assert_allclose(arrays["layer3.sink"], first, atol=1e-6)
    assert arrays["layer3.fitted_mass"].shape == (12, LENGTH)
    assert len(arrays) == 4 * 5


def test_the_positional_part_of_rope_is_in_the_file(rope, tmp_path):
    file = tmp_path / "position.npz"
    arrays = {
        name.removeprefix("layer2."): array
        for name, array in draw_numbers(
            rope.folder, "--show", "position", "--layer", 2, "--head", 1, "--out", file
        ).items()
    }
    scores = np.stack([model_scores(rope, sample.ids, 2).numpy() for sample in heldout_samples(rope, LENGTH, 0, 4)])
    for d in range(LENGTH - 1):
        diagonal = scores[:, :, range(d + 1, LENGTH), range(1, LENGTH - d)]  # (windows, heads, pairs)
        np.testing.assert_allclose(arrays["mean_score"][:, d], diagonal.mean((0, 2)), atol=1e-5)
        np.testing.assert_allclose(arrays["standard_deviation"][:, d], diagonal.std((0, 2)), atol=1e-4)
    angles = arrays["frequencies"][:, None] * arrays["distances"] + arrays["phase"][:, :, None]
    kernel = arrays["constant"][:, None] + (arrays["amplitude"][:, :, None] * np.cos(angles)).sum(1)
    np.testing.assert_allclose(arrays["kernel"], kernel, atol=1e-9)


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


@pytest.mark.parametrize("file", ["numbers.png", "numbers.csv", "numbers"])
def test_another_ending_is_refused_before_anything_is_drawn(tmp_path, file):
    result = CliRunner().invoke(app, ["draw", "alibi", "--numbers", str(tmp_path / file)])
    assert str(result.exception) == (
        f"cannot write the numbers of a picture to {file!r}: the name must end in .json, .npz, .safetensors."
    )
    assert not list(tmp_path.iterdir())
