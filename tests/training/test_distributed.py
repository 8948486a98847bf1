"""Several processes over gloo: the run of one process with the same global batch, and checkpoints that one opens.

Processes share the batches (replicated or sharded), or with run.context_parallel each window.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from many_processes import run

import relpos
from relpos.runs.checkpoints import read_log
from relpos.runs.settings import load_settings
from relpos.training.training import train

pytestmark = pytest.mark.heavy

SETTINGS = {
    "data.tokenizer": "bpe-280",
    "data.length": 16,
    "run.batch_size": 4,
    "run.log_every": 1,
    "run.eval_every": 2,
    "run.save_every": 2,
    "run.steps": 4,
}
BATCHES = {"model.encoding": "fire", "run.eval_windows": 3}  # shared unevenly by two
SLICES = {"model.encoding": "cable", "run.eval_windows": 4, "data.separate_documents": True}


@pytest.fixture(scope="module", autouse=True)
def corpus(tmp_path_factory):
    """Short documents: most windows hold several, and some cross the border between two slices."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = folder / "texts"
    texts.mkdir()
    for number in range(30):
        lines = (f"the {i * i % 89} and the {i % 7} of {number}" for i in range(2 * (number % 4) + 2))
        (texts / f"{number:02}.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELPOS_CACHE", str(folder / "cache"))
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield texts


def torchrun(processes: int, *words: object) -> list[str]:
    starts = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*starts, "-m", "relpos.cli", *map(str, words)]


def command(processes: int, corpus: Path, out: Path, settings: dict[str, object]) -> list[str]:
    complete = {**SETTINGS, "data.source": corpus, "run.out": out, **settings}
    return torchrun(processes, "train", *(f"{key}={value}" for key, value in complete.items()))


def launch(words: list[str], code: int = 0) -> str:
    """The standard error of a command that ends with this code."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stderr


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """By settings: the run of one process."""
    runs: dict[str, Path] = {}

    def of(**settings: object) -> Path:
        key = json.dumps(settings)
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("alone") / "run"
            place = {"data.source": str(corpus), "run.out": str(runs[key])}
            train(load_settings(None, {**SETTINGS, **place, **settings}), lambda text: None)
        return runs[key]

    return of


def same_run(a: Path, b: Path, checkpoint: str = ".") -> None:
    """The loss curve, and the model or that of a checkpoint."""
    for name in ("loss", "heldout"):
        one, two = ([(entry["step"], entry[name]) for entry in read_log(x) if name in entry] for x in (a, b))
        assert len(one) >= 3
        assert [step for step, _ in one] == [step for step, _ in two]
        assert [loss for _, loss in one] == pytest.approx([loss for _, loss in two], abs=2e-4)
    tokens = torch.arange(1, 17)[None]
    models = (transformers.AutoModelForCausalLM.from_pretrained(folder / checkpoint) for folder in (a, b))
    one, two = (model(tokens).logits for model in models)
    torch.testing.assert_close(one, two, rtol=0, atol=2e-3)


@pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_processes_give_the_run_of_one(alone, corpus, tmp_path, sharded):
    launch(command(2, corpus, tmp_path / "run", {**BATCHES, "run.fsdp": sharded}))
    assert (tmp_path / "run" / "checkpoint-4" / "optimizer.safetensors").exists() == sharded
    same_run(alone(**BATCHES), tmp_path / "run")
    same_run(alone(**BATCHES), tmp_path / "run", "checkpoint-2")


def test_two_processes_with_a_slice_each_give_the_run_of_one(alone, corpus, tmp_path):
    launch(command(2, corpus, tmp_path / "run", {**SLICES, "run.context_parallel": 2}))
    same_run(alone(**SLICES), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "more"),
    [
        ("learned", {}),
        ("dape", {"run.micro_batch_size": 1}),
        ("fire", {"run.fsdp": True}),
        ("cable", {"run.fsdp": True}),
        ("rope", {"model.gradient_checkpointing": True}),
    ],
)
def test_two_groups_of_two_processes_give_the_run_of_one(alone, corpus, tmp_path, encoding, more):
    settings = {**SLICES, "model.encoding": encoding}
    launch(command(4, corpus, tmp_path / "run", {**settings, "run.context_parallel": 2, **more}))
    same_run(alone(**settings), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_models_on_slices_have_the_loss_and_the_gradients_of_the_window(processes):
    errors = run(processes, "sliced_models:compare", 9)
    assert len(errors) == 4
    assert max(errors.values()) < 1e-6, errors


@pytest.mark.slow
def test_a_model_on_slices_refuses_what_only_a_window_has():
    said = run(2, "sliced_models:refusals")
    assert "a slice of 4 tokens has 5 labels" in said["labels"]
    assert "does not decode and takes no padding: leave out use_cache." in said["use_cache"]
    assert "leave out attention_mask." in said["attention_mask"]


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_resume_from_their_checkpoint(corpus, tmp_path, sharded):
    """Each checkpoint follows an evaluation, after which parts of a sharded model are gathered."""
    settings = {**BATCHES, "run.fsdp": sharded, "run.steps": 6, "optimizer.warmup_steps": 0}
    for out in ("straight", "resumed"):
        launch(command(2, corpus, tmp_path / out, settings))
    resumed = tmp_path / "resumed"
    for file in (resumed / "result.json", resumed / "model.safetensors", *(resumed / "checkpoint-6").rglob("*")):
        file.unlink()
    (resumed / "checkpoint-6").rmdir()
    launch(command(2, corpus, resumed, settings))
    assert (resumed / "model.safetensors").read_bytes() == (tmp_path / "straight" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_killed_run_resumes_as_if_nothing_had_been(corpus, tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    settings = {**SLICES, "run.context_parallel": 2, "run.steps": 24, "run.keep_checkpoints": 20}
    settings["model.encoding"] = "forgetting"
    launch(command(2, corpus, straight, settings))
    with subprocess.Popen(command(2, corpus, killed, settings)) as process:
        while not (killed / "checkpoint-6").exists():
            assert process.poll() is None
            time.sleep(0.02)
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(workers) == 2
        for pid in (process.pid, *map(int, workers)):
            os.kill(pid, signal.SIGKILL)
    assert not (killed / "result.json").exists()  # it was killed in the middle indeed
    launch(command(2, corpus, killed, settings))
    assert (killed / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "settings", "sentence"),
    [
        (2, {"run.batch_size": 3}, "a batch of 3 windows cannot be shared by 2 processes"),
        (3, {"run.context_parallel": 2}, "divides each window among 2 processes, and there are 3"),
    ],
)
def test_what_processes_cannot_share_is_refused(corpus, tmp_path, processes, settings, sentence):
    assert sentence in launch(command(processes, corpus, tmp_path / "run", {**BATCHES, **settings}), code=1)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"run.context_parallel": 3}, "windows of 512 tokens cannot be divided among 3 processes evenly"),
        ({"run.context_parallel": 0}, "run.context_parallel must be at least 1"),
        ({"run.context_parallel": 2, "model.family": "bert"}, "BERT attends in both directions: leave it at 1"),
    ],
)
def test_what_cannot_be_divided_is_refused_at_once(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        load_settings(None, settings)


def test_one_process_cannot_share_a_window(alone, corpus, tmp_path):
    place = {"data.source": str(corpus), "run.out": str(tmp_path / "run"), "run.context_parallel": 2}
    with pytest.raises(ValueError, match="among 2 processes, and there is 1: start a multiple of 2, as in torchrun"):
        train(load_settings(None, {**SETTINGS, **SLICES, **place}))
    with pytest.raises(ValueError, match="among the processes of a launch, and there is 1: start several"):
        relpos.evaluate(alone(**SLICES), context_parallel=True)


def evaluated(folder: Path, out: Path, processes: int) -> dict[int, Any]:
    """The rows of relpos evaluate by length."""
    words = ["evaluate", str(folder), "--out", str(out), "--lengths", "9,16,32", "--split", "all"]
    one = [sys.executable, "-m", "relpos.cli", *words]
    launch(one if processes == 1 else torchrun(processes, *words, "--context-parallel"))
    (file,) = out.glob("*/*.json")
    return {row["length"]: row for row in json.loads(file.read_text())["rows"]}


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["cable", "learned"])
def test_an_evaluation_over_two_processes_has_the_numbers_of_one(alone, tmp_path, encoding):
    trained = alone(**{**SLICES, "model.encoding": encoding})
    one, two = (evaluated(trained, tmp_path / str(processes), processes) for processes in (1, 2))
    assert two[9]["error"] == "windows of 9 tokens cannot be divided among 2 processes evenly: give a multiple."
    assert two[16]["loss"] == pytest.approx(one[16]["loss"], abs=1e-5)
    if encoding == "learned":  # whose table ends at 16: the second slice alone is beyond it, and both say so
        assert "learned has 16 positions" in one[32]["error"]
        assert "learned has 16 positions" in two[32]["error"]
    else:
        assert two[32]["loss"] == pytest.approx(one[32]["loss"], abs=1e-5)
