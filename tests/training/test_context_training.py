"""Training with windows divided among processes: the run of one process, also after a kill."""

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
from test_distributed import SETTINGS, same_curve

import relpos
from relpos.runs.settings import load_settings
from relpos.training.training import train

pytestmark = pytest.mark.heavy

SETTINGS = {**SETTINGS, "run.eval_windows": 4, "data.separate_documents": True}


@pytest.fixture(scope="module", autouse=True)
def corpus(tmp_path_factory):
    """Short documents: most windows hold several, and some cross the border between two slices."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = folder / "texts"
    texts.mkdir()
    for number in range(30):
        lines = (f"the {i * i % 89} and the {i % 7} of {number}" for i in range(number % 4 + 1))
        (texts / f"{number:02}.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELPOS_CACHE", str(folder / "cache"))
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        yield texts


def command(processes: int, corpus: Path, out: Path, overrides: dict[str, object]) -> list[str]:
    named = {key.replace("__", "."): value for key, value in overrides.items()}
    settings = {**SETTINGS, "data.source": corpus, "run.out": out, **named}
    starts = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*starts, "-m", "relpos.cli", "train", *(f"{key}={value}" for key, value in settings.items())]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def launch(processes: int, corpus: Path, out: Path, **overrides: object) -> subprocess.CompletedProcess[str]:
    words = command(processes, corpus, out, overrides)
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment(), timeout=1200)


def trained(*args, **overrides):
    done = launch(*args, **overrides)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """By encoding: the run of one process."""
    runs: dict[str, Path] = {}

    def of(encoding: str) -> Path:
        if encoding not in runs:
            runs[encoding] = tmp_path_factory.mktemp("alone") / encoding
            own = {"data.source": str(corpus), "run.out": str(runs[encoding]), "model.encoding": encoding}
            train(load_settings(None, {**SETTINGS, **own}))
        return runs[encoding]

    return of


def same_model(a: Path, b: Path) -> None:
    tokens = torch.arange(1, 17)[None]
    one, two = (transformers.AutoModelForCausalLM.from_pretrained(folder)(tokens).logits for folder in (a, b))
    torch.testing.assert_close(one, two, rtol=0, atol=2e-3)


def test_two_processes_with_a_slice_each_give_the_run_of_one(alone, corpus, tmp_path):
    trained(2, corpus, tmp_path / "run", run__context_parallel=2, model__encoding="cable")
    same_curve(alone("cable"), tmp_path / "run")
    same_model(alone("cable"), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "more"),
    [
        ("learned", {}),
        ("dape", {"run__micro_batch_size": 1}),
        ("fire", {"run__fsdp": True}),
        ("cable", {"run__fsdp": True}),
        ("rope", {"model__gradient_checkpointing": True}),
    ],
)
def test_two_groups_of_two_processes_give_the_run_of_one(alone, corpus, tmp_path, encoding, more):
    trained(4, corpus, tmp_path / "run", run__context_parallel=2, model__encoding=encoding, **more)
    same_curve(alone(encoding), tmp_path / "run")
    same_model(alone(encoding), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_models_on_slices_have_the_loss_and_the_gradients_of_the_window(processes):
    found = run(processes, "sliced_models:compare", 9)
    assert len(found) == 4
    assert max(found.values()) < 1e-6, found


@pytest.mark.slow
def test_a_model_on_slices_refuses_what_only_a_window_has():
    said = run(2, "sliced_models:refusals")
    assert "a slice of 4 tokens has 5 labels" in said["labels"]
    assert "does not decode and takes no padding: leave out use_cache." in said["use_cache"]
    assert "leave out attention_mask." in said["attention_mask"]


@pytest.mark.slow
def test_a_killed_run_resumes_as_if_nothing_had_been(corpus, tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    own = {"run__context_parallel": 2, "run__steps": 24, "run__keep_checkpoints": 20, "model__encoding": "forgetting"}
    trained(2, corpus, straight, **own)
    with subprocess.Popen(command(2, corpus, killed, own), env=environment()) as process:
        while not (killed / "checkpoint-6").exists():
            assert process.poll() is None
            time.sleep(0.02)
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(workers) == 2
        for pid in (process.pid, *map(int, workers)):
            os.kill(pid, signal.SIGKILL)
    assert not (killed / "result.json").exists()  # it was killed in the middle indeed
    trained(2, corpus, killed, **own)
    assert (killed / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_too_few_processes_are_refused(corpus, tmp_path):
    done = launch(3, corpus, tmp_path / "run", run__context_parallel=2)
    assert "run.context_parallel=2 divides each window among 2 processes, and there are 3" in done.stderr


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


def test_one_process_cannot_share_a_window(corpus, tmp_path):
    own = {"data.source": str(corpus), "run.out": str(tmp_path / "run"), "run.context_parallel": 2}
    with pytest.raises(ValueError, match="among 2 processes, and there is 1: start a multiple of 2, as in torchrun"):
        train(load_settings(None, {**SETTINGS, **own}))


def evaluated(folder: Path, out: Path, *options: str, processes: int = 1) -> dict[str, Any]:
    """The rows of relpos evaluate by length."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    start = [*start, "-m"] if processes > 1 else [sys.executable, "-m"]
    words = [*start, "relpos.cli", "evaluate", str(folder), "--out", str(out), *options]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment(), timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = out.glob("*/*.json")
    return {row["length"]: row for row in json.loads(file.read_text())["rows"]}


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["cable", "learned"])
def test_an_evaluation_over_two_processes_has_the_numbers_of_one(alone, tmp_path, encoding):
    options = ("--lengths", "9,16,32", "--split", "all")
    one = evaluated(alone(encoding), tmp_path / "one", *options)
    two = evaluated(alone(encoding), tmp_path / "two", *options, "--context-parallel", processes=2)
    assert two[9]["error"] == "windows of 9 tokens cannot be divided among 2 processes evenly: give a multiple."
    assert two[16]["loss"] == pytest.approx(one[16]["loss"], abs=1e-5)
    if encoding == "learned":  # whose table ends at 16: the second slice alone is beyond it, and both say so
        assert "learned has 16 positions" in one[32]["error"]
        assert "learned has 16 positions" in two[32]["error"]
    else:
        assert two[32]["loss"] == pytest.approx(one[32]["loss"], abs=1e-5)


def test_an_evaluation_by_one_process_cannot_be_divided(alone):
    with pytest.raises(ValueError, match="among the processes of a launch, and there is 1: start several"):
        relpos.evaluate(alone("cable"), context_parallel=True)
