"""Two processes over gloo: the loss curve of one process with the same global batch, and checkpoints that one opens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from relpos.runs.checkpoints import read_log
from relpos.runs.settings import load_settings
from relpos.training.training import train

pytestmark = pytest.mark.heavy

SETTINGS = {
    "model.encoding": "fire",
    "data.tokenizer": "bpe-280",
    "data.length": 16,
    "run.batch_size": 4,
    "run.log_every": 1,
    "run.eval_every": 4,
    "run.eval_windows": 3,  # shared unevenly by two
    "run.save_every": 3,
    "run.steps": 6,
}


@pytest.fixture(scope="module", autouse=True)
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    file = folder / "text.txt"
    file.write_text("\n".join(f"the {i * i % 89} and the {i % 7} of {i}" for i in range(90)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELPOS_CACHE", str(folder / "cache"))
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        yield file


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    train(load_settings(None, {**SETTINGS, "data.source": str(corpus), "run.out": str(out)}))
    return out


def two_processes(corpus: Path, out: Path, **overrides: object) -> None:
    named = {key.replace("__", "."): value for key, value in overrides.items()}
    settings = {**SETTINGS, "data.source": corpus, "run.out": out, **named}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "relpos.cli", "train", *(f"{key}={value}" for key, value in settings.items())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]


def same_curve(a: Path, b: Path) -> None:
    for name in ("loss", "heldout"):
        one, two = ([(entry["step"], entry[name]) for entry in read_log(x) if name in entry] for x in (a, b))
        assert len(one) >= 3
        assert [step for step, _ in one] == [step for step, _ in two]
        assert [loss for _, loss in one] == pytest.approx([loss for _, loss in two], abs=2e-4)


def same_model(a: Path, b: Path) -> None:
    tokens = torch.arange(1, 25)[None]
    one, two = (transformers.AutoModelForCausalLM.from_pretrained(folder)(tokens).logits for folder in (a, b))
    torch.testing.assert_close(one, two, rtol=0, atol=2e-3)


def test_two_processes_give_the_loss_curve_of_one(alone, corpus, tmp_path):
    two_processes(corpus, tmp_path / "run")
    same_curve(alone, tmp_path / "run")
    same_model(alone, tmp_path / "run")


def test_a_sharded_run_saves_a_checkpoint_that_one_process_opens(alone, corpus, tmp_path):
    two_processes(corpus, tmp_path / "run", run__fsdp=True)
    assert (tmp_path / "run" / "checkpoint-6" / "optimizer.safetensors").exists()  # it was sharded indeed
    same_curve(alone, tmp_path / "run")
    same_model(alone, tmp_path / "run")
    same_model(alone / "checkpoint-3", tmp_path / "run" / "checkpoint-3")


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True], ids=["replicated", "sharded"])
def test_two_processes_go_on_from_their_checkpoint(alone, corpus, tmp_path, fsdp):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    two_processes(corpus, straight, run__fsdp=fsdp, run__steps=8, optimizer__warmup_steps=0)
    two_processes(corpus, resumed, run__fsdp=fsdp, run__steps=8, optimizer__warmup_steps=0)
    for name in ("result.json", "model.safetensors"):
        (resumed / name).unlink()
    for file in sorted((resumed / "checkpoint-8").rglob("*")):
        file.unlink()
    (resumed / "checkpoint-8").rmdir()
    two_processes(corpus, resumed, run__fsdp=fsdp, run__steps=8, optimizer__warmup_steps=0)
    assert (resumed / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_batch_that_two_cannot_share_is_refused(corpus, tmp_path):
    with pytest.raises(AssertionError, match="a batch of 3 windows cannot be shared by 2 processes"):
        two_processes(corpus, tmp_path / "run", run__batch_size=3)
