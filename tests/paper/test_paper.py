"""relpos figures: the files, the numbers in them, and what happens when a training fails."""

import base64
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import relpos
from relpos.cli import app
from relpos.encodings.registry import encoding, names
from relpos.paper import figures as paper
from relpos.paper.figures import FIGURES, choose, draw_figures, needs_training, training_settings, write_page
from relpos.paper.figures_options import FigureOptions
from relpos.pictures.draw import draw
from relpos.runs.settings import load_settings
from relpos.system.executors import Parts
from relpos.training.parallel import makespan, train_in_parallel
from relpos.training.training import train

pytestmark = pytest.mark.heavy

SEED = json.loads((Path(__file__).parents[1] / "data" / "seed-figures.json").read_text())["figures"]
SMALL = {"data.tokenizer": "bpe-280", "run.batch_size": 2, "run.eval_windows": 2}


@pytest.fixture
def small(world, monkeypatch):
    """Figures of 16 tokens, from models that are trained for three steps."""
    monkeypatch.setattr(paper, "LENGTH", 16)
    return {"settings": {**SMALL, "data.source": str(world / "text.txt")}}


def test_figure_12_comes_without_training_and_has_the_ticks_of_the_paper(tmp_path):
    result = CliRunner().invoke(app, ["figures", "--figure", "12", "--out", str(tmp_path / "figures")])
    assert result.exit_code == 0, result.output
    numbers = json.loads((tmp_path / "figures" / "figure12-alibi.json").read_text())
    assert (numbers["figure"], numbers["encoding"], numbers["shows"], numbers["length"]) == (12, "alibi", "bias", 512)
    (layer,) = numbers["layers"]
    assert (layer["uniformity"], layer["context_dependence"]) == (1.0, 0.0)
    for head in layer["heads"]:
        assert sorted(head["ticks"]) == pytest.approx(sorted(SEED["12"]["heads"][str(head["head"])]), abs=1e-9)
        assert head["minimum"] == pytest.approx(-511 * 2 ** (-8 * head["head"] / 12))
        assert (str(head["maximum"]), head["uniformity"]) == ("0.0", 1.0)  # not −0
    assert not (tmp_path / "runs").exists()


def test_the_figures_are_those_of_the_paper():
    as_here = {"kerple": "kerple_log", "t5": "clipped"}  # what the paper's names are called here
    printed = {int(number): as_here.get(figure["encoding"], figure["encoding"]) for number, figure in SEED.items()}
    maps = {figure.number: figure.model.encoding for figure in FIGURES if figure.beside is None}
    assert maps == {**printed, 8: "cable", 9: "dapev2", 11: "dapev2"}
    assert FIGURES[0].number == 12
    assert sorted(figure.number for figure in choose(())) == [4, *sorted({**printed, 8: ""})]


def test_only_what_training_cannot_change_needs_none():
    free = {name for name in names() if not needs_training(encoding(name, 12, 16))}
    assert free >= {"alibi", "sandwich"}
    assert not free & {"kerple_log", "fire", "clipped", "t5", "rope", "cable", "cope", "learned"}


def test_figures_are_trained_drawn_and_listed(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Parts.run, "__defaults__", (0.2,))  # seconds between two lines
    messages = []
    runs, out = tmp_path / "runs", tmp_path / "figures"
    assert draw_figures(out, [4, 8, 12, 15], runs=runs, steps=3, say=messages.append, **small) == []
    shown = capsys.readouterr().err.splitlines()  # one line for both trainings, and nothing else
    assert shown
    assert [
        line
        for line in shown
        if not re.match(r"[012] of 2 trained(  (rope|cable) (starting|\d+%))*(  about .* left)?$", line)
    ] == []
    stems = ("figure4-cable-alibi", "figure8-cable", "figure12-alibi", "figure15-rope")
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["index.html", *(stem + suffix for stem in stems for suffix in (".png", ".pdf", ".json", ".txt"))]
    )
    for stem in stems:
        assert (out / f"{stem}.pdf").read_bytes().startswith(b"%PDF")
        assert (out / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
    rope = json.loads((out / "figure15-rope.json").read_text())
    assert (rope["shows"], rope["seed"], rope["layers"][0]["layer"]) == ("scores", 0, 4)
    assert rope["training"]["steps"] == 3
    assert rope["training"]["tokens"] == 3 * 2 * 16
    assert {"seconds", "heldout", "position_lr", "table_lr", "table_eps"} <= set(rope["training"])
    assert rope["training"]["threads"] == 1
    assert {"document", "offset", "first_words"} <= set(rope["input"])
    assert {"relpos", "torch", "matplotlib"} <= set(rope["versions"])
    assert rope["model"]["preset"] == "nano"
    for head in rope["layers"][0]["heads"]:
        assert head["minimum"] <= min(head["ticks"]) <= max(head["ticks"]) <= head["maximum"]
        assert 0 <= head["uniformity"] <= 1
        assert head["context_dependence"] > 0
    assert rope["caption"].startswith("Figure 15: RoPE (rope), GPT-2 nano, layer 4 of 4: the attention scores")
    assert "Trained 3 steps" in rope["caption"]
    assert rope["caption_latex"].startswith("RoPE (rope), GPT-2 nano")  # LaTeX numbers figures
    assert (out / "figure15-rope.txt").read_text() == rope["caption_latex"] + "\n"
    assert f"Uniformity along diagonals {rope['layers'][0]['uniformity']:.3f}" in rope["caption"]

    # The same model with one thread, trained in this process: the figure depends on nothing else.
    settings = training_settings(paper.CABLE, FigureOptions(runs=tmp_path / "again", steps=3, **small))
    train(load_settings(None, settings), lambda text: None)
    weights = [folder / "figures-cable-nano" / "model.safetensors" for folder in (runs, tmp_path / "again")]
    first, second = map(load_file, weights)
    assert all(torch.equal(first[name], second[name]) for name in first)

    before = (runs / "figures-rope-nano" / "model.safetensors").stat().st_mtime_ns
    again = []
    assert draw_figures(out, [15], runs=runs, seed=1, say=again.append, **small) == []
    assert (runs / "figures-rope-nano" / "model.safetensors").stat().st_mtime_ns == before
    assert "is reused" in again[0]
    assert json.loads((out / "figure15-rope.json").read_text())["input"] != rope["input"]

    check_page(out, stems, rope)
    check_pair(out)


def check_pair(out):
    """Figure 4 has three heads of CABLE, from the flattest to the deepest, and three of ALiBi, with their numbers."""
    pair, cable, alibi = (
        json.loads((out / f"{stem}.json").read_text())
        for stem in ("figure4-cable-alibi", "figure8-cable", "figure12-alibi")
    )
    rows = pair["layers"][0]["heads"]
    assert [row["head"].rsplit(" ", 1)[0] for row in rows] == ["CABLE"] * 3 + ["ALiBi"] * 3
    for row in rows:
        source = cable if row["head"].startswith("CABLE") else alibi
        (same,) = (head for head in source["layers"][0]["heads"] if str(head["head"]) == row["head"].split()[1])
        assert {**row, "ticks": 0, "head": 0} == {**same, "ticks": 0, "head": 0}
    depths = [row["maximum"] - row["minimum"] for row in rows]
    assert depths[:3] == sorted(depths[:3])
    assert depths[3:] == pytest.approx([15 * 2 ** (-8 * head / 12) for head in (12, 6, 1)])
    assert pair["caption"].startswith("Figure 4: Heads of CABLE (above) and ALiBi (below), from the flattest to")
    assert set(pair["models"]) == {"CABLE", "ALiBi"}


def check_page(out, stems, rope):
    """The page of Figures 4, 8, 12 and 15: headings, links, pictures, and how the models were trained."""
    page = (out / "index.html").read_text()
    assert re.findall(r"<h2.*?>(.*?)</h2>", page) == [
        "Figure 4: CABLE and ALiBi (<code>cable</code>, <code>alibi</code>)",
    ] + [
        f"Figure {number}: {title} (<code>{name}</code>)"
        for number, title, name in ((8, "CABLE", "cable"), (12, "ALiBi", "alibi"), (15, "RoPE", "rope"))
    ]
    first = page.split("<h1>")[1].split("<p>")[1]  # at the top of the page, and not of Figure 12, which has no model
    assert first.startswith("<strong>The trained models are nano (4 layers), trained for 3 steps.</strong>")
    links = re.findall(r'href="([^"]+)"', page)
    assert links[:5] == ["https://arxiv.org/abs/2503.08067", *(f"#{stem}" for stem in stems)]
    assert links[5:] == [stem + suffix for stem in stems for suffix in (".pdf", ".json", ".txt")]
    assert re.findall(r'id="(.*?)"', page) == list(stems)
    images = re.findall(r'src="data:image/png;base64,(.*?)"', page)
    assert [base64.b64decode(image) for image in images] == [(out / f"{stem}.png").read_bytes() for stem in stems]
    assert page.count("src=") == 4
    assert "<script" not in page
    assert "<link" not in page
    assert rope["caption"].split(".")[0] in page


def test_a_figure_is_trained_by_steps_unless_minutes_are_given():
    """By the clock, a busy or a faster machine gave another picture."""
    for model in {model for figure in FIGURES for model in figure.models}:
        by_default = load_settings(None, training_settings(model, FigureOptions())).run
        assert (by_default.steps, by_default.minutes) == (model.steps, None)
        by_clock = load_settings(None, training_settings(model, FigureOptions(minutes=2.0))).run
        assert (by_clock.steps, by_clock.minutes) == (None, 2.0)


def test_the_page_counts_heads_that_add_nothing_and_gives_them_no_numbers(tmp_path):
    position = relpos.encoding("cable", heads=3, head_dim=8)
    with torch.no_grad():
        position.steps.bias.copy_(torch.tensor([-100.0, 1.0, -100.0]))
    picture = draw(position, length=32)
    numbers = {"figure": 8, "caption": picture.caption, **picture.numbers}
    (tmp_path / "figure8-cable.json").write_text(json.dumps(numbers))
    picture.save(tmp_path / "figure8-cable.png")
    page = write_page(tmp_path).read_text()
    assert "Bias exactly 0: 2 of 3 heads." in page
    rows = re.findall(r"<tr>\s*<td.*?</tr>", page, re.DOTALL)
    assert [re.findall(r"<td.*?>(.*?)</td>", row)[3:] for row in rows if "exactly" in row] == [
        ["–", "–", "bias exactly 0"]
    ] * 2
    assert [row.count("–") for row in rows] == [0, 2, 0, 2]  # all heads, then each


def test_the_page_compares_the_ticks_with_those_that_the_paper_prints(tmp_path):
    """ALiBi learns nothing: its ticks are the printed ones, for all heads. Of other figures both are in the table."""
    assert draw_figures(tmp_path, [12], say=lambda message: None) == []
    page = (tmp_path / "index.html").read_text()
    assert "The colour bars of all 12 heads have exactly the ticks that the paper prints." in page
    numbers = json.loads((tmp_path / "figure12-alibi.json").read_text())
    printed = paper.printed_ticks(12)
    assert [head["ticks"] for head in numbers["layers"][0]["heads"]] == printed
    assert printed[0] == [-300, -250, -200, -150, -100, -50, 0]
    assert page.count("−300 to 0, every 50") == 2
    numbers["layers"][0]["heads"][0]["ticks"] = [-400, -200, 0]
    (tmp_path / "figure12-alibi.json").write_text(json.dumps(numbers))
    page = write_page(tmp_path).read_text()
    assert "exactly the ticks" not in page
    assert "−400 to 0, every 200" in page


def test_trainings_at_once_end_with_a_sentence_each(tmp_path):
    wrong = {"model.encoding": "allibi", "run.out": str(tmp_path / "a"), "run.steps": 1}
    ended = dict(train_in_parallel({"a": wrong, "b": wrong | {"run.out": str(tmp_path / "b")}}, workers=2, threads=1))
    assert ended.keys() == {"a", "b"}
    assert all("Did you mean 'alibi'?" in error for error in ended.values())
    assert makespan([1.0] * 5, 2) == 3  # three rounds of two
    assert makespan([0.5, 0.25, 1.0], 2) == 1.25  # the second worker is free first


@pytest.mark.slow
def test_a_training_that_fails_is_told_and_the_others_go_on(small, tmp_path):
    messages = []
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "figures-fire-nano").write_text("in the way")
    failed = draw_figures(tmp_path, [12, 13, 14], runs=tmp_path / "runs", steps=1, say=messages.append, **small)
    assert len(failed) == 1
    assert failed[0].startswith("Figure 13 (fire) was not made: the folder ")
    assert failed[0] in messages
    assert (tmp_path / "figure14-clipped.png").exists()
    assert "figure13" not in (tmp_path / "index.html").read_text()


def test_what_went_wrong_ends_the_command_with_a_sentence(tmp_path):
    (tmp_path / "runs").write_text("in the way")
    arguments = ["--figure", "12", "--figure", "10", "--out", str(tmp_path), "--runs", str(tmp_path / "runs")]
    result = CliRunner().invoke(app, ["figures", *arguments])
    assert isinstance(result.exception, ValueError)
    assert "1 of the figures could not be made" in str(result.exception)
    assert (tmp_path / "figure12-alibi.png").exists()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"figure": [7]}, "there is no figure 7: give some of 4, 5, 8, 9, 10, 11, 12, 13, 14, 15"),
        ({"minutes": -1}, "minutes must be above 0 and finite, not -1"),
        ({"minutes": float("nan")}, "minutes must be above 0 and finite, not nan"),
        ({"steps": 0}, "steps must be at least 1 and finite, not 0"),
        ({"workers": 0}, "workers must be at least 1 and finite, not 0"),
        ({"settings": {"run.stepss": 3}}, "Did you mean 'run.steps'?"),
    ],
    ids=str,
)
def test_wrong_numbers_are_refused_before_anything_is_drawn_or_trained(tmp_path, wrong, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        draw_figures(tmp_path / "figures", runs=tmp_path / "runs", **wrong)
    assert not list(tmp_path.iterdir())
