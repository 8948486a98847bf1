"""What the command line can do, Python can: the same numbers, the same files."""

import builtins
import inspect
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from small_run import SMALL_RUN
from typer.testing import CliRunner

import relpos
from relpos.cli import app
from relpos.comparison.comparison import load_comparison
from relpos.evaluation.evaluate_options import SAMPLES
from relpos.runs.run import Run
from relpos.training.train import TrainOptions

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("world")]
OPTIONS = {"length": 16, "steps": 2, "batch_size": 4, "lr": 1e-3, "seed": 1, "tokenizer": "bpe-280"}
WORK = ("seconds", "tokens_per_second", "peak_memory_bytes")


def run_command(*arguments):
    done = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def flags(options):
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]


def pairs(overrides):
    return [f"{key}={value}" for key, value in overrides.items()]


def without_work(result):
    return {**result, "rows": [{key: row[key] for key in row if key not in WORK} for row in result["rows"]]}


@pytest.fixture(scope="module")
def trained(world):
    """A run trained by Python, and the folder of the same run trained by the command."""
    shared = {"data": world / "text.txt", **OPTIONS}
    overrides = {"run.eval_windows": 4, "run.save_every": 1}
    run = relpos.train("rope", options={"base": 500}, out=world / "python", overrides=overrides, say=str, **shared)
    assert isinstance(run, Run)
    named = {"encoding": "rope", "option": "base=500", "out": world / "command", **shared}
    run_command("train", *flags(named), *pairs(overrides))
    return run, world / "command"


class TestTrain:
    def test_trains_the_model_of_the_command_and_returns_its_result(self, trained):
        run, folder = trained
        other = relpos.open(folder)
        assert run.checksum == other.checksum
        python, command = (yaml.safe_load((each.folder / "run.yaml").read_text()) for each in (run, other))
        assert python["run"].pop("out") != command["run"].pop("out")
        assert python == command
        assert python["model"]["options"] == {"base": 500, "length": 16}
        assert (python["optimizer"]["lr"], python["run"]["batch_size"], python["run"]["seed"]) == (1e-3, 4, 1)
        assert (run.encoding, run.trained_length, run.result["step"]) == ("rope", 16, 2)
        assert run.result == json.loads((run.folder / "result.json").read_text())

    def test_again_resumes(self, trained, tmp_path):
        folder, said = tmp_path / "copy", []
        shutil.copytree(trained[0].folder, folder)
        again = relpos.train(config=folder / "run.yaml", steps=3, out=folder, say=said.append)
        assert again.result["step"] == 3
        assert any("resuming from" in text for text in said)

    def test_overrides_win_over_options_and_options_over_a_file(self, tmp_path):
        (tmp_path / "own.yaml").write_text("data: {length: 32}\nrun: {steps: 7, seed: 3}\n")
        options = TrainOptions(config=tmp_path / "own.yaml", overrides={"run.seed": 5}, length=64, seed=4)
        settings = options.settings()
        assert (settings.data.length, settings.run.steps, settings.run.seed) == (64, 7, 5)


class TestEvaluate:
    def test_is_what_the_command_prints_and_writes(self, trained, tmp_path):
        run, folder = trained
        shared = {"eval_tokens": 128, "split": "heldout"}
        command = {"lengths": "16,32", "rope_scaling": "yarn,linear:2", "out": tmp_path / "command", **shared}
        printed = run_command("evaluate", run.folder, folder, *flags(command), "--json")
        python = {"lengths": [32, 16], "rope_scaling": ["yarn", "linear:2"], "out": tmp_path / "python", **shared}
        evaluation = relpos.evaluate([run, str(folder)], **python)
        labels = [f"{name}{scaling}" for name in ("python", "command") for scaling in ("", ", yarn", ", linear:2")]
        assert list(evaluation.results) == labels
        results = [without_work(result) for result in evaluation.results.values()]
        assert results == [without_work(result) for result in json.loads(printed)]
        assert [json.loads(file.read_text()) for file in evaluation.files] == list(evaluation.results.values())
        files = [sorted(p.relative_to(tmp_path / name) for p in (tmp_path / name).rglob("*.*")) for name in labels[::3]]
        assert files[0] == files[1]
        (picture,) = evaluation.pictures
        assert picture.read_bytes() == (tmp_path / "command" / picture.name).read_bytes()

    def test_by_default_writes_beside_the_run_and_takes_multiples_of_the_trained_length(self, trained):
        run, said = trained[0], []
        evaluation = relpos.evaluate(run, say=said.append)
        (result,) = evaluation.results.values()
        assert [row["length"] for row in result["rows"]] == [16, 32]  # the held-out text has fewer than 64 tokens
        assert evaluation.files == [run.folder / "evaluation" / "windows.json"]
        assert evaluation.pictures == [run.folder / "evaluation" / "windows.png"]
        assert said[-1].startswith("python: windows, length 32: perplexity")

    def test_refuses_a_run_twice_and_none(self, trained):
        run, _ = trained
        with pytest.raises(ValueError, match=f"the run {run.folder} is given twice"):
            relpos.evaluate([run, run.folder])
        with pytest.raises(ValueError, match="at least one folder"):
            relpos.evaluate([])


@pytest.mark.slow  # tests/comparison proves both ways by themselves
def test_compare_is_what_the_command_makes(world, tmp_path):
    overrides = {key: SMALL_RUN[key] for key in SMALL_RUN if key not in ("model.encoding", "data.length")}
    overrides |= {"run.steps": 2, "data.source": str(world / "text.txt")}
    shared = {"length": 16, "seeds": 1, "positions": 32, "eval_tokens": 64, "lr": 1e-3}
    report = relpos.compare(
        ["alibi"], lengths=[16, 32], overrides=overrides, out=tmp_path / "python", say=str, **shared
    )
    assert report.failed == {}
    shutil.copytree(tmp_path / "python", tmp_path / "command")  # its trials are the same, and not run again
    command = {"encodings": "alibi", "lengths": "16,32", "out": tmp_path / "command", **shared}
    printed = run_command("compare", *flags(command), *pairs(overrides))
    plans = [load_comparison(tmp_path / name) for name in ("python", "command")]
    assert {**vars(plans[0]), "commands": []} == {**vars(plans[1]), "commands": []}
    assert plans[0].settings["optimizer.lr"] == 1e-3
    rows = [line for line in report.markdown.read_text().splitlines() if re.match(r"\| \W*alibi\W* \|", line)]
    assert len(rows) > 1
    assert rows[0] in (tmp_path / "command" / report.markdown.name).read_text()  # later tables have speeds
    assert report.html.read_text().startswith("<!")
    assert str(tmp_path / "command" / report.html.name) in printed


def test_draw_is_what_the_command_writes(trained, tmp_path):
    run, _ = trained
    printed = run_command("draw", run.folder, "--length", 12, "--label-tokens", "--out", tmp_path / "command.png")
    picture = relpos.draw(run, length=12, label_tokens=True)
    assert picture.save(tmp_path / "python.png").read_bytes() == (tmp_path / "command.png").read_bytes()
    assert picture.caption in printed


def test_a_function_has_the_names_defaults_and_documentation_of_its_options():
    parameters = inspect.signature(relpos.evaluate).parameters
    assert list(parameters)[:3] == ["runs", "lengths", "seed"]
    assert (parameters["protocol"].default, parameters["samples"].default) == ("windows", SAMPLES)
    assert parameters["lengths"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "    samples: Sequences of the task at each length. Default: 100." in inspect.getdoc(relpos.evaluate)
    with pytest.raises(TypeError, match="lenghts"):
        relpos.evaluate("runs/none", lenghts=[3])
    for name in ("compare", "draw", "evaluate", "figures", "open", "train"):
        assert name in dir(relpos)
        documentation = inspect.getdoc(getattr(relpos, name))
        for section in ("Args:\n", "Returns:\n", *([] if name in ("open", "draw") else ["Example:\n"])):
            assert section in documentation, name


def test_open_opens_a_run_and_leaves_pythons_own_alone(trained):
    run, _ = trained
    assert relpos.open(run.folder).checksum == run.checksum
    assert relpos.open is not builtins.open
    names: dict[str, object] = {}
    exec("from relpos import *", names)
    assert "open" not in names
    assert "train" in names
    with open(Path(relpos.__file__), encoding="utf-8") as file:
        assert file.readline().startswith('"""relpos')
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        relpos.trian  # noqa: B018
