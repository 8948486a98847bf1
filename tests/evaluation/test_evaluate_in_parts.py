"""An evaluation divided into parts: the files and pictures of one that is not."""

import json
from pathlib import Path

import pytest
from small_run import SMALL_RUN

import relpos
from relpos.evaluation.scoring import Scorer
from relpos.runs.settings import load_settings
from relpos.system.executors import LocalExecutor
from relpos.system.slurm import SlurmExecutor
from relpos.training.training import train

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("world")]
TIMES = {"seconds", "tokens_per_second", "peak_memory_bytes"}  # what differs between any two evaluations
QUESTIONS = {  # runs, and what is asked of them
    "windows": (["one", "two"], {"lengths": [16, 32]}),
    "positions": (["one"], {"lengths": [64], "protocol": "positions", "rope_scaling": "linear:4", "data": "other.txt"}),
}


@pytest.fixture(scope="module")
def runs(world):
    """Two trained models, and another text, in the folder `world`."""
    for name, encoding in (("one", "rope"), ("two", "learned")):  # of which the second refuses more than 16 tokens
        settings = {**SMALL_RUN, "model.encoding": encoding, "run.steps": 4, "run.out": str(world / name)}
        train(load_settings(None, {**settings, "data.source": str(world / "text.txt")}))
    (world / "other.txt").write_text("\n".join(f"a {i} and a {i * i % 31}" for i in range(200)))


def without_times(entry):
    if isinstance(entry, dict):
        return {key: without_times(value) for key, value in entry.items() if key not in TIMES}
    return [without_times(value) for value in entry] if isinstance(entry, list) else entry


def contents(out: Path) -> dict[str, object]:
    """Every file that a reader opens: results without their times, pictures byte by byte."""
    files = {file.relative_to(out): file for file in out.rglob("*") if file.is_file() and file.parent.name != "parts"}
    return {
        str(name): without_times(json.loads(file.read_text())) if file.suffix == ".json" else file.read_bytes()
        for name, file in files.items()
    }


@pytest.mark.parametrize("question", ["windows", pytest.param("positions", marks=pytest.mark.slow)])
def test_the_results_and_pictures_are_the_same(question, runs, world, monkeypatch):
    monkeypatch.chdir(world)
    names, arguments = QUESTIONS[question]
    alone = relpos.evaluate(names, **arguments, out=f"alone-{question}")
    cells = Scorer._cells

    def refused(scorer, *arguments):
        """Everything is computed by the parts, and nothing by this process but what the second model refuses."""
        with pytest.raises(ValueError, match="learned has 16 positions"):
            cells(scorer, *arguments)
        return cells(scorer, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scorer, "_cells", refused)
        executor = LocalExecutor(workers=2, cores=1)
        parts = relpos.evaluate(names, **arguments, out=f"parts-{question}", executor=executor)
    assert without_times(parts.results) == without_times(alone.results)
    if question == "windows":
        assert "learned has 16 positions" in parts.results["two"]["rows"][1]["error"]
    found = contents(world / f"parts-{question}")
    assert found == contents(world / f"alone-{question}")
    assert sum(name.endswith(".json") for name in found) == len(alone.results)
    assert sum(name.endswith(".png") for name in found) == 1
    assert not list((world / f"parts-{question}").rglob("*.log"))


def test_a_task_in_parts(world, tmp_path):
    settings = {"data.task": "recall", "model.encoding": "rope", "run.steps": 2, "run.out": str(world / "task")}
    train(load_settings(None, settings))
    ask = {"task": "recall", "lengths": [64, 96], "samples": 4}
    alone = relpos.evaluate(world / "task", **ask, out=tmp_path / "alone")
    parts = relpos.evaluate(world / "task", **ask, out=tmp_path / "parts", workers=2)
    assert parts.results == alone.results
    assert contents(tmp_path / "parts") == contents(tmp_path / "alone")


@pytest.mark.slow  # tests/system has a journey of every executor
def test_as_jobs_of_submitit(world, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(world)
    with SlurmExecutor(cluster="local", workers=2) as executor:
        parts = relpos.evaluate("one", lengths=[16], out=tmp_path / "parts", executor=executor)
    alone = relpos.evaluate("one", lengths=[16], out=tmp_path / "alone")
    assert without_times(parts.results) == without_times(alone.results)


def test_a_part_that_is_killed_is_named_with_its_log(world, runs, monkeypatch, tmp_path):
    """Python itself is replaced by a program that fails."""
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho no luck\nexit 3\n")
    failing.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(failing))
    with pytest.raises(
        ValueError, match=r"2 of 2 parts failed. one, length 16: its process ended with code 3: see"
    ) as e:
        relpos.evaluate(world / "one", lengths=[16, 32], workers=2, out=tmp_path / "out")
    assert "Rerun the command to resume." in str(e.value)
    assert (tmp_path / "out/one/parts/one-length-16.log").read_text() == "no luck\n"
