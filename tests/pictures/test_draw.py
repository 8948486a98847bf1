"""relpos draw of trained models: what is drawn, what is said of it, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import relpos
from relpos.cli import app
from relpos.maps.layer import model_layers
from relpos.maps.map import map_of_layer
from relpos.pictures.draw import draw
from relpos.pictures.printed_page import COLOUR_BAR
from relpos.runs.run import heldout_samples, open_run
from relpos.training.training import train

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("world")]


@pytest.fixture(scope="module")
def runs(world, settings):
    """Short runs that have learned a little."""
    for name in ("cable", "kerple_log", "fire"):
        train(settings(world / name, model__encoding=name, optimizer__position_lr=0.1), lambda text: None)
    return world


def titles(picture):
    return [axes.get_title() for axes in picture.figure.axes if axes.images]


def test_a_run_draws_its_last_layer_on_held_out_text(runs):
    picture = draw(runs / "cable")
    (layer_map,) = picture.maps
    assert (layer_map.layer, layer_map.show, layer_map.heads, layer_map.length) == (4, "bias", 12, 16)
    assert [title.split(":")[0] for title in titles(picture)] == [f"Head {head}" for head in range(1, 13)]
    about = picture.numbers
    run = open_run(runs / "cable")
    ids = run.tokenizer(text_of(runs), add_special_tokens=False)["input_ids"]
    assert about["input"]["tokens"] == 16
    assert run.tokenizer.decode(ids[about["input"]["offset"] :]).startswith(about["input"]["first_words"][:20])
    assert about["input"] != about["compared_with"]
    assert about["training"]["steps"] == run.result["step"] == 9
    assert "Trained 9 steps, 576 tokens" in picture.caption
    assert f"held-out loss {run.result['heldout']:.2f}" in picture.caption
    assert 0 < about["layers"][0]["context_dependence"] < 1.5
    assert 0 < about["layers"][0]["uniformity"] < 1
    json.dumps(about)


def text_of(runs):
    """The held-out text: the last tenth."""
    text = (runs / "text.txt").read_text()
    return text[text.find("\n", len(text) - len(text) // 10 - 1) + 1 :]


def test_kerple_is_zero_on_the_diagonal_and_falls(runs):
    for layer in (1, 2, 3, 4):
        picture = draw(runs / "kerple_log", layer=layer, show="profile")
        low, mean, high = picture.maps[0].profile
        assert (mean[:, 0] == 0).all()
        assert (np.diff(mean, axis=1) < 0).all()
        assert (low == high).all()
        assert picture.numbers["layers"][0]["uniformity"] == 1.0
        assert picture.numbers["layers"][0]["context_dependence"] == 0.0


def test_fire_is_uniform_up_to_its_threshold_and_not_beyond(runs):
    """Its threshold, 16 at the start, has been trained too."""
    run = open_run(runs / "fire")
    position = run.model.transformer.h[3].attn.position
    threshold = int(position.length * position.stretch(torch.float64).item())
    text = text_of(runs)
    within = draw(run, text=text, length=threshold + 1).maps[0]
    assert min(within.uniformity.heads) > 1 - 1e-9
    beyond = draw(run, text=text, length=3 * threshold).maps[0]
    assert max(beyond.uniformity.heads) < 1 - 1e-6


def test_the_seed_chooses_the_window(runs):
    run = open_run(runs / "cable")
    first, second = heldout_samples(run, 16, seed=0)
    assert not torch.equal(first.ids, second.ids)
    assert torch.equal(heldout_samples(run, 16, seed=0)[0].ids, first.ids)
    assert len({heldout_samples(run, 16, seed)[0].offset for seed in range(20)}) > 1


def test_a_checkpoint_tells_how_far_it_was(runs):
    picture = draw(runs / "cable" / "checkpoint-6")
    assert picture.numbers["training"]["steps"] == 6
    assert "Trained 6 steps, 384 tokens" in picture.caption
    assert not np.array_equal(picture.maps[0].mean, draw(runs / "cable").maps[0].mean, equal_nan=True)


def test_a_contact_sheet_has_every_layer_and_head(runs):
    picture = draw(runs / "cable", layer="all")
    panels = [axes for axes in picture.figure.axes if axes.images]
    assert len(panels) == 48
    assert [layer_map.layer for layer_map in picture.maps] == [1, 2, 3, 4]
    assert panels[12].get_ylabel() == "Layer 2"
    low, high = picture.maps[1].range(3)
    shown = panels[15].get_xlabel().replace("−", "-").split("\n")
    assert [float(number) for number in shown] == pytest.approx([low, high], rel=5e-3, abs=1e-6)
    shared = draw(runs / "cable", layer="all", shared_scale=True)
    assert len({axes.images[0].norm.vmin for axes in shared.figure.axes if axes.images}) == 1


def test_tokens_are_named_on_both_axes(runs):
    text = "word3 and $4\nand $5"
    picture = draw(runs / "cable", text=text, label_tokens=True, head=[2], show="weights")
    (panel,) = [axes for axes in picture.figure.axes if axes.images]
    shown = [label.get_text() for label in panel.get_xticklabels()]
    assert "".join(shown) == text.replace(" ", "·").replace("\n", "⏎")
    assert shown == [label.get_text() for label in panel.get_yticklabels()]
    assert picture._repr_png_().startswith(b"\x89PNG")  # a dollar begins no formula


def test_the_command_draws_a_run(runs, tmp_path):
    (tmp_path / "words.txt").write_text("word3 and 4 word5 and 6 word7 and 8")
    folder = str(runs / "kerple_log")
    for arguments in (
        ["--text-file", str(tmp_path / "words.txt"), "--show", "scores", "--columns", "1", "--out", "a.pdf"],
        ["--layer", "all", "--show", "profile", "--out", "b.svg"],
        ["--layer", "2", "--head", "1", "--head", "12", "--width", "4", "--out", "c.png"],
    ):
        out = tmp_path / arguments[-1]
        result = CliRunner().invoke(app, ["draw", folder, *arguments[:-1], str(out)])
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith(f"{out}: kerple_log, GPT-2 nano")
        assert out.stat().st_size > 2000


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"layer": 5}, "there is no layer 5: give last, all, or a number from 1 to 4"),
        ({"layer": "first"}, "there is no layer first"),
        ({"head": [13]}, "there is no head 13: give numbers from 1 to 12"),
        ({"show": "wieghts"}, "Did you mean 'weights'?"),
        ({"text": ""}, "text is empty"),
        ({"text": "a b", "length": 900}, "fewer than the length 900"),
        ({"length": 10**5}, "tokens, fewer than 100000"),
        ({"label_tokens": True, "text": "word " * 70}, "too many to be named"),
        ({"label_tokens": True, "layer": "all"}, "one layer only"),
        ({"options": {"width": 3}}, "a trained model has its own"),
        ({"heads": 4}, "--heads 4 is for an untrained encoding; .*cable has its own 12 heads: .* with --head"),
        ({"head_dim": 4}, "--head-dim 4 is for an untrained encoding"),
        ({"log": True}, "--log is for the distances of a profile"),
        ({"causal": False}, "cable was trained with attention causal: leave causal=False out"),
        ({"show": "profile", "shared_scale": True}, "a profile has no colours to share"),
        ({"what": "rope", "show": "bias"}, "adds no bias"),
        ({"what": "alibi", "text": "a"}, "reads no text"),
        ({"what": "alibi", "label_tokens": True}, "has no tokens to name"),
        ({"what": "alibi", "layer": 2}, "one layer, not layer 2"),
        ({"what": "allibi"}, "unknown encoding or folder 'allibi'. Did you mean 'alibi'?"),
        ({"what": "no/such/folder"}, "there is no folder no/such/folder"),
        ({"what": relpos.encoding("alibi", heads=3, head_dim=8), "heads": 2}, "Alibi has its own 3 heads"),
        ({"what": []}, "nothing to draw: give an encoding's name or a folder, or --all"),
        ({"what": ["alibi", "rope"], "show": "mass"}, "as heat maps or profiles: leave --show mass out"),
        ({"what": ["alibi", "rope"], "label_tokens": True}, "leave --label-tokens out"),
        ({"all": True}, "--all draws every encoding: leave .*cable out"),
        ({"what": (), "all": True, "show": "weights"}, "in the same way: leave show out"),
        ({"what": ["alibi", "rope"], "show": "profile"}, r"bias of alibi, scores of rope\): draw them separately"),
        ({"what": ["alibi", "alibi"], "show": "profile"}, "alibi is given twice"),
        ({"what": ["alibi", "t5"], "show": "profile", "layer": "all"}, "give one layer, not all"),
    ],
    ids=str,
)
def test_what_cannot_be_drawn_gets_a_sentence(runs, options, sentence):
    with pytest.raises((ValueError, OSError), match=sentence.replace("?", r"\?")):
        draw(**{"what": runs / "cable", **options})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["alibi", "--out", "x.gif"], "cannot write a picture to 'x.gif': the name must end in .png, .pdf, .svg, "),
        (
            ["alibi", "--numbers", "x.csv"],
            "cannot write the numbers of a picture to 'x.csv': the name must end in .json,",
        ),
        (["alibi", "--text", "a", "--text-file", "b"], "give --text or --text-file, not both."),
    ],
)
def test_what_the_command_cannot_write_is_refused_before_the_work(tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["draw", *arguments])
    assert isinstance(result.exception, ValueError)
    assert str(result.exception).startswith(sentence)
    assert not list(tmp_path.iterdir())


def test_a_run_that_has_not_finished_is_refused(runs, tmp_path):
    shutil.copytree(runs / "cable", tmp_path / "begun", ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    with pytest.raises(FileNotFoundError, match="A run has been started there"):
        draw(tmp_path / "begun")
    with pytest.raises(ValueError, match="is a file"):
        draw(runs / "cable" / "config.json")


@pytest.mark.parametrize("length", [16, 600])  # entry by entry, and by the pieces of its function
def test_a_bias_that_is_the_same_for_every_input_is_drawn_without_reading_one(runs, monkeypatch, length):
    """Reading 8,192 tokens twice took most of the time of a trained FIRE."""
    run = open_run(runs / "fire")
    text = " ".join([text_of(runs)] * 40)
    ids = torch.tensor(run.tokenizer(text)["input_ids"][:length])
    expected = map_of_layer(model_layers(run.family, run.model, ids, [4])[0], "bias")

    def read(*args, **kwargs):
        raise AssertionError("the model has read its input")

    monkeypatch.setattr(run.model.transformer, "forward", read)
    (drawn,) = draw(run, text=text, length=length).maps
    np.testing.assert_array_equal(drawn.mean, expected.mean)
    np.testing.assert_array_equal(drawn.profile, expected.profile)
    with pytest.raises(AssertionError, match="has read"):
        draw(run, text=text, length=length, show="scores")


def test_several_encodings_and_runs_share_the_profile_of_a_head(runs):
    together = draw(["alibi", runs / "kerple_log"], show="profile", length=16, head=[1, 12])
    alone = {what: draw(what, show="profile", length=16, head=[1, 12]) for what in ("alibi", runs / "kerple_log")}
    assert [axes.get_title() for axes in together.figure.axes] == ["Head 1", "Head 12"]
    for place, axes in enumerate(together.figure.axes):
        drawn = [line.get_ydata() for line in axes.lines]
        expected = [picture.figure.axes[0].lines[place].get_ydata() for picture in alone.values()]
        np.testing.assert_array_equal(drawn, expected)
        assert len({line.get_color() for line in axes.lines}) == 2
    assert [text.get_text() for text in together.figure.legends[0].get_texts()] == ["alibi", "kerple_log"]
    assert [numbers["encoding"] for numbers in together.numbers["profiles"]] == ["alibi", "kerple_log"]


def test_several_encodings_and_runs_are_drawn_side_by_side(runs):
    """Three heads of each, with the values and the colours that it has alone; one colour map for the page."""
    page = draw(["alibi", "rope", runs / "kerple_log"], length=16)
    panels = [axes for axes in page.figure.axes if axes.get_label() != COLOUR_BAR]
    assert [axes.get_title() for axes in panels[:3]] == ["alibi, head 1", "rope, head 1", "kerple_log, head 1"]
    assert [axes.get_title() for axes in panels[::3]] == ["alibi, head 1", "alibi, head 6", "alibi, head 12"]
    for place, what in enumerate(("alibi", "rope", runs / "kerple_log")):
        expected = draw(what, length=16).maps[0].mean[[0, 5, 11]]
        drawn = [np.ma.filled(axes.images[0].get_array(), np.nan) for axes in panels[place::3]]
        np.testing.assert_array_equal(drawn, expected)
    assert len({axes.images[0].get_cmap().name for axes in panels}) == 1
    bars = [axes for axes in page.figure.axes if axes.get_label() == COLOUR_BAR]
    assert [axes.get_ylabel() for axes in bars[:3]] == ["bias", "score", "bias"]
    assert [numbers["shows"] for numbers in page.numbers["maps"]] == ["bias", "scores", "bias"]
    assert "rope: the attention scores of equal tokens" in page.caption
    assert "heads 1, 6 and 12" in page.caption
    weights = draw(["alibi", "rope"], length=16, show="weights", head=[2])
    assert [numbers["shows"] for numbers in weights.numbers["maps"]] == ["weights", "weights"]
