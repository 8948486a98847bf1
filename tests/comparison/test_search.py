"""The equal search: what is tried, by what it is chosen, and that the table is of text it never read."""

import json
import os
import shlex

import pytest
from small_run import SMALL_RUN
from typer.testing import CliRunner

from relpos.cli import app
from relpos.comparison.compare import run_trial
from relpos.comparison.comparison import RECORD, Trial, load_comparison, make_comparison, read_record
from relpos.comparison.report import write_report
from relpos.comparison.search import choose_settings, make_search, search_folder, tries
from relpos.evaluation.evaluation import evaluate
from relpos.models.plan import layer_encodings
from relpos.runs.run import open_run
from relpos.runs.settings import load_settings, parse_overrides

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("world")]
SHARED = {key: value for key, value in SMALL_RUN.items() if key != "model.encoding"}


@pytest.fixture(scope="module")
def shared(world):
    """Settings that all trials share: a text whose two held-out halves differ."""
    words = [f"word{i * i % 97} and {i % 13} of {i % 7}" for i in range(600)]
    file = world / "long.txt"
    file.write_text("\n".join(" ".join(words[i : i + 4]) for i in range(0, 600, 2)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 1)
        yield {**SHARED, "data.source": str(file)}


def test_every_encoding_is_given_the_same_settings_as_far_as_it_has_the_parameters(tmp_path, shared):
    comparison = make_comparison(
        tmp_path / "c",
        ["cable", "alibi", "clipped", "learned"],
        settings={**shared, "optimizer.lr": 0.001},
        search=True,
    )
    rates = {
        name: [tuple(attempt.settings.values()) for attempt in tries(comparison, name, tmp_path)]
        for name in comparison.encodings
    }
    grid = [(0.0005, 0.0005), (0.0005, 0.005), (0.001, 0.001), (0.001, 0.01), (0.002, 0.002), (0.002, 0.02)]
    assert rates["cable"] == rates["learned"] == grid
    assert rates["alibi"] == [(0.0005,), (0.001,), (0.002,)]
    assert rates["clipped"] == [(lr, table) for lr in (0.0005, 0.001, 0.002) for table in (0.01, 0.1)]


def test_an_encoding_gets_the_setting_with_the_lowest_validation_loss_and_is_scored_on_the_test_half(world, shared):
    out = world / "searched"
    make_comparison(out, ["alibi"], 1, [16, 32], settings=shared, search=True, last=True)
    assert not load_comparison(out).settled("alibi")
    search = make_search(out)
    assert (search.split, search.lengths, search.settings["run.steps"]) == ("validation", [16], 3)
    losses = {}
    for trial in search.trials():
        assert choose_settings(out).chosen == {}  # not before all are over
        assert run_trial(search, search_folder(out), trial, threads=1) == 0
        run = open_run(search_folder(out) / trial.name)
        losses[run.settings.optimizer.lr] = evaluate(run, [16], split="validation", say=str)["rows"][0]["loss"]
    lowest = min(losses, key=losses.get)
    comparison = choose_settings(out)
    assert comparison.chosen == {"alibi": {"optimizer.lr": lowest}}
    assert make_search(out) is None
    assert run_trial(comparison, out, Trial("alibi", 0), threads=1) == 0
    assert open_run(out / "alibi-s0").settings.optimizer.lr == lowest
    record = read_record(out, Trial("alibi", 0))
    assert [record[name]["split"] for name in ("windows", "last", "positions")] == ["test"] * 3
    assert [row["length"] for row in record["last"]["rows"]] == [16, 32]
    text = write_report(out)[1].read_text()
    assert "## What was tried for each encoding" in text
    assert "## Perplexity of the last tokens" in text
    assert text.count("| `alibi` | 0.00") == 3
    assert f"**{losses[lowest]:.4f}**" in text


def test_a_try_that_failed_is_not_chosen_and_a_comparison_without_a_search_stays_one(tmp_path, shared):
    out = tmp_path / "c"
    make_comparison(out, ["alibi"], 1, [16], settings=shared, search=True)
    make_search(out)
    attempts = tries(load_comparison(out), "alibi", out)
    for attempt, record in zip(attempts, ({"error": "no"}, _scored(5.0), _scored(4.0)), strict=True):
        folder = search_folder(out) / attempt.trial.name
        folder.mkdir()
        (folder / RECORD).write_text(json.dumps(record))
    assert choose_settings(out).chosen["alibi"] == attempts[2].settings
    make_comparison(tmp_path / "plain", ["alibi"], 1, [16], settings=shared)
    with pytest.raises(ValueError, match="without a search"):
        make_comparison(tmp_path / "plain", ["alibi"], search=True)


def _scored(loss: float) -> dict[str, object]:
    return {"error": None, "windows": {"rows": [{"length": 16, "loss": loss, "error": None}]}}


def test_an_encoding_may_have_settings_of_the_optimizer_to_itself_but_no_other_data(tmp_path, shared):
    entry = "kerple_log:clamped=true:optimizer.position_weight_decay=1.5"
    comparison = make_comparison(tmp_path / "c", ["alibi", entry], settings=shared)
    settings = comparison.settings_of(Trial(entry, 0), tmp_path)
    assert (settings.model.options, settings.optimizer.position_weight_decay) == ({"clamped": True}, 1.5)
    assert comparison.settings_of(Trial("alibi", 0), tmp_path).optimizer.position_weight_decay == 0
    refused = CliRunner().invoke(
        app, ["compare", "--encodings", "kerple_log:optimizer.rate=1", "--out", f"{tmp_path}/e"]
    )
    assert "unknown setting 'optimizer.rate'" in str(
        refused.exception
    )  # by the settings, not as an option of the encoding
    with pytest.raises(ValueError, match=r"data\.length to one encoding: data, model and length must be the same"):
        make_comparison(tmp_path / "d", ["alibi:data.length=32"], settings=shared)


def test_an_encoding_may_be_a_sum_or_have_others_in_some_layers(tmp_path, shared):
    entries = ["rope+ssmax", "rope:window=8:every2=nope"]
    comparison = make_comparison(tmp_path / "c", entries, settings={**shared, "model.preset": "pico"})
    summed, layered = (comparison.settings_of(Trial(entry, 0), tmp_path) for entry in entries)
    assert (summed.model.encoding, summed.model.options["parts"]) == ("sum", ["rope", "ssmax"])
    rope = {"name": "rope", "length": 16}  # the trained length, which scalings of RoPE need
    assert layer_encodings(layered.model.position(), 2) == [{**rope, "window": 8}, {"name": "nope"}]
    assert Trial(entries[1], 0).name == "rope-window=8-every2=nope-s0"
    commands = [comparison.train_command(Trial(entry, 0), tmp_path) for entry in entries]
    again = [load_settings(None, parse_overrides(shlex.split(command)[2:])) for command in commands]
    assert [settings.model for settings in again] == [summed.model, layered.model]


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("rope+ssmaxx", "Did you mean 'ssmax'"),
        ("rope:every2=nopee", "Did you mean 'nope'"),
        ("rope:bass=3", "Did you mean 'base'"),
        ("alibi:data.length=32", "data.length to one encoding"),
    ],
)
def test_a_wrong_entry_is_refused_by_the_command(tmp_path, entry, sentence):
    result = CliRunner().invoke(app, ["compare", "--encodings", f"alibi,{entry}", "--out", str(tmp_path / "c")])
    assert result.exit_code != 0
    assert sentence in " ".join(f"{result.output} {result.exception}".split())
    assert not (tmp_path / "c").exists()
