"""What the command line can do, Python can: the same numbers, the same files."""

import builtins
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import SMALL_RUN
from typer.testing import CliRunner

import relpos
from relpos.cli import app
from relpos.comparison.comparison import load_comparison
from relpos.evaluation.options import SAMPLES
from relpos.runs.run import Run
from relpos.training.train import TrainOptions

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("world")]
NAMES = ["compare", "draw", "evaluate", "figures", "open", "train"]
OPTIONS = {"length": 16, "steps": 2, "batch_size": 4, "lr": 1e-3, "seed": 1, "tokenizer": "bpe-280"}
COMMAND = ["--length", "16", "--steps", "2", "--batch-size", "4", "--lr", "1e-3", "--seed", "1"]
COMMAND += ["--tokenizer", "bpe-280"]
WORK = ("seconds", "tokens_per_second", "peak_memory_bytes")


def run_command(*arguments):
    done = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def without_work(result):
    return {**result, "rows": [{key: row[key] for key in row if key not in WORK} for row in result["rows"]]}


@pytest.fixture(scope="module")
def trained(world):
    """The folder of a run trained by Python, and of the same run trained by the command."""
    overrides = {"run.eval_windows": 4, "run.save_every": 1}
    data = world / "text.txt"
    run = relpos.train(
        "rope", options={"base": 500}, data=data, out=world / "python", overrides=overrides, say=str, **OPTIONS
    )
    assert isinstance(run, Run)
    pairs = [f"{key}={value}" for key, value in overrides.items()]
    named = ["--encoding", "rope", "--option", "base=500", "--data", data, "--out", world / "command"]
    run_command("train", *named, *COMMAND, *pairs)
    return run, world / "command"


class TestTrain:
    def test_trains_the_model_of_the_command(self, trained):
        run, folder = trained
        other = relpos.open(folder)
        assert run.checksum == other.checksum
        python, command = (yaml.safe_load((each.folder / "run.yaml").read_text()) for each in (run, other))
        assert python["run"].pop("out") != command["run"].pop("out")
        assert python == command
        assert python["model"]["options"] == {"base": 500, "length": 16}
        assert (python["optimizer"]["lr"], python["run"]["batch_size"], python["run"]["seed"]) == (1e-3, 4, 1)

    def test_returns_the_run_with_its_result(self, trained):
        run, _ = trained
        assert (run.encoding, run.trained_length) == ("rope", 16)
        assert run.result == json.loads((run.folder / "result.json").read_text())
        assert run.result["step"] == 2

    def test_again_resumes(self, trained, tmp_path):
        folder = tmp_path / "copy"
        shutil.copytree(trained[0].folder, folder)
        said = []
        again = relpos.train(config=folder / "run.yaml", steps=3, out=folder, say=said.append)
        assert again.result["step"] == 3
        assert any("resuming from" in text for text in said)

    def test_overrides_win_over_options_and_options_over_a_file(self, tmp_path):
        (tmp_path / "own.yaml").write_text("data: {length: 32}\nrun: {steps: 7, seed: 3}\n")
        options = TrainOptions(config=tmp_path / "own.yaml", overrides={"run.seed": 5}, length=64, seed=4)
        settings = options.settings()
        assert (settings.data.length, settings.run.steps, settings.run.seed) == (64, 7, 5)

    def test_refuses_wrong_settings_before_torch_is_imported(self):
        code = """
import sys, relpos
try: relpos.train("kerpel_log")
except ValueError as error: print(error)
assert not {"torch", "transformers"} & set(sys.modules)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert "Did you mean 'kerple_log'" in done.stdout


class TestEvaluate:
    def test_is_what_the_command_prints_and_writes(self, trained, tmp_path):
        run, folder = trained
        options = ["--lengths", "16,32", "--eval-tokens", "128", "--rope-scaling", "yarn,linear:2"]
        options += ["--split", "heldout"]
        printed = run_command("evaluate", run.folder, folder, *options, "--out", tmp_path / "command", "--json")
        evaluation = relpos.evaluate(
            [run, str(folder)],
            lengths=[32, 16],
            eval_tokens=128,
            rope_scaling=["yarn", "linear:2"],
            split="heldout",
            out=tmp_path / "python",
        )
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
        run, _ = trained
        said = []
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


class TestCompare:
    SHARED = {key: value for key, value in SMALL_RUN.items() if key not in ("model.encoding", "data.length")}

    def test_is_what_the_command_makes(self, world, tmp_path):
        shared = {**self.SHARED, "run.steps": 2, "data.source": str(world / "text.txt")}
        options = {"length": 16, "lengths": [16, 32], "seeds": 1, "positions": 32, "eval_tokens": 64, "lr": 1e-3}
        report = relpos.compare(["alibi"], **options, overrides=shared, out=tmp_path / "python", say=str)
        assert report.failed == {}
        pairs = [f"{key}={value}" for key, value in shared.items()]
        flags = ["--length", 16, "--lengths", "16,32", "--seeds", 1, "--positions", 32, "--eval-tokens", 64]
        arguments = ["--encodings", "alibi", *flags, "--lr", "1e-3", "--out", tmp_path / "command", *pairs]
        shutil.copytree(
            tmp_path / "python", tmp_path / "command"
        )  # its trials are those of the command, and not run again
        printed = run_command("compare", *arguments)
        plans = [load_comparison(tmp_path / name) for name in ("python", "command")]
        assert {**vars(plans[0]), "commands": []} == {**vars(plans[1]), "commands": []}
        assert plans[0].settings["optimizer.lr"] == 1e-3
        lines = report.markdown.read_text().splitlines()
        table = [line for line in lines if re.match(r"\| \W*alibi\W* \|", line)]
        other = (tmp_path / "command" / report.markdown.name).read_text()
        assert len(table) > 1
        assert all(row in other for row in table[:1])  # perplexity by length; later tables have speeds
        assert report.html.read_text().startswith("<!")
        assert str(tmp_path / "command" / report.html.name) in printed


class TestPictures:
    def test_draw_is_what_the_command_writes(self, trained, tmp_path):
        run, _ = trained
        printed = run_command("draw", run.folder, "--length", 12, "--label-tokens", "--out", tmp_path / "command.png")
        picture = relpos.draw(run, length=12, label_tokens=True)
        assert picture.save(tmp_path / "python.png").read_bytes() == (tmp_path / "command.png").read_bytes()
        assert picture.caption in printed

    def test_figures_are_what_the_command_writes(self, tmp_path):
        printed = run_command("figures", "--figure", 12, "--out", tmp_path / "command")
        said = []
        assert relpos.figures(tmp_path / "python", [12], say=said.append) == []
        python, command = (sorted((tmp_path / name).iterdir()) for name in ("python", "command"))
        assert [file.name for file in python] == [file.name for file in command]
        for file, other in zip(python, command, strict=True):
            assert file.read_bytes() == other.read_bytes(), file.name
        assert "\n".join(said).replace(str(tmp_path / "python"), str(tmp_path / "command")) == printed.strip()


def test_a_function_has_the_names_and_defaults_of_its_options():
    parameters = inspect.signature(relpos.evaluate).parameters
    assert list(parameters)[:3] == ["runs", "lengths", "seed"]
    assert (parameters["protocol"].default, parameters["samples"].default) == ("windows", SAMPLES)
    assert parameters["lengths"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "    samples: Sequences of the task at each length. Default: 100." in inspect.getdoc(relpos.evaluate)
    with pytest.raises(TypeError, match="lenghts"):
        relpos.evaluate("runs/none", lenghts=[3])


def test_names_are_listed_and_documented():
    assert set(NAMES) < set(dir(relpos))
    for name in NAMES:
        documentation = inspect.getdoc(getattr(relpos, name))
        assert "Args:\n" in documentation, name
        assert "Returns:\n" in documentation, name
        if name not in ("open", "draw"):  # of other rooms
            assert "Example:\n" in documentation, name


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


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        relpos.trian  # noqa: B018
