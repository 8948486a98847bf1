"""What RelposTrainer relies on inside transformers' Trainer: a new version that changes any of it fails here.

docs/training-loop.md lists the overrides and why each is needed.
"""

import dataclasses
import inspect
import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import accelerate
import pytest
import transformers
import yaml
from packaging.requirements import Requirement
from transformers import Trainer

from relpos.runs.checkpoints import read_log
from relpos.training import trainer as trainer_module
from relpos.training.trainer import RelposTrainer
from relpos.training.training import train

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("world")]
ROOT = Path(__file__).parents[2]
# By override: the parameters that Trainer's own method has, in the versions that pyproject.toml allows.
OVERRIDES = {
    "create_accelerator_and_postprocess": ["self"],
    "create_optimizer": ["self", "model"],
    "create_scheduler": ["self", "num_training_steps", "optimizer"],
    "_save_checkpoint": ["self", "model", "trial"],
    "save_model": ["self", "output_dir", "_internal_call"],
    "_save_optimizer_and_scheduler": ["self", "output_dir"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
}
START = ["create_accelerator_and_postprocess", "create_optimizer", "create_scheduler"]
SAVE = ["_save_checkpoint", "save_model", "_save_optimizer_and_scheduler"]


def watch(patch: pytest.MonkeyPatch, trainer: type[RelposTrainer] = RelposTrainer) -> list[str]:
    """A list that receives the name of every override when Trainer calls it; calls from one of ours are left out."""
    calls: list[str] = []

    def watched(name: str):
        method = getattr(trainer, name)

        def call(self, *args, **kwargs):
            if sys._getframe(1).f_code.co_filename != trainer_module.__file__:
                calls.append(name)
            return method(self, *args, **kwargs)

        return call

    for name in OVERRIDES:
        patch.setattr(trainer, name, watched(name))
    return calls


def test_the_installed_versions_are_those_that_pyproject_allows():
    lab = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["lab"]
    allowed = {need.name: need.specifier for need in map(Requirement, lab)}
    for module in (transformers, accelerate):
        assert module.__version__ in allowed[module.__name__]
        assert any(bound.operator == "<" for bound in allowed[module.__name__])


def test_the_overrides_are_those_listed_here_with_the_signatures_of_trainer():
    """A new one joins the list, the tests below and docs/training-loop.md."""
    ours = {name for name, value in vars(RelposTrainer).items() if inspect.isfunction(value) and hasattr(Trainer, name)}
    assert ours == {"__init__", *OVERRIDES}
    page = (ROOT / "docs" / "training-loop.md").read_text()
    for name, parameters in OVERRIDES.items():
        assert f"`{name}`" in page
        original, override = (inspect.signature(getattr(owner, name)).parameters for owner in (Trainer, RelposTrainer))
        assert list(original) == list(override) == parameters
        assert [p.kind for p in override.values()] == [p.kind for p in original.values()]
        assert [p.default for p in override.values()] == [p.default for p in original.values()]


def test_trainer_calls_the_overrides_in_this_order(settings, tmp_path, monkeypatch):
    calls = watch(monkeypatch)
    train(settings(tmp_path, run__steps=4, run__save_every=2))
    assert calls == [*START, *SAVE, *SAVE]
    calls.clear()
    train(settings(tmp_path, run__steps=6, run__save_every=2))
    assert calls == [START[0], "_load_from_checkpoint", *START[1:], "_load_optimizer_and_scheduler", *SAVE]


@pytest.mark.slow
def test_a_sharded_training_calls_the_overrides_in_this_order(settings, tmp_path):
    """One process is enough to shard. The model is loaded after it was sharded, not before."""
    script = """
import json, sys
from pathlib import Path
import pytest
from transformers import Trainer
from relpos.runs.settings import load_settings
from relpos.training.training import silent, train
from test_trainer_overrides import watch

enabled, order, create = [], [], Trainer.create_accelerator_and_postprocess

def watched(self):
    create(self)
    enabled.append(self.is_fsdp_enabled)

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Trainer, "create_accelerator_and_postprocess", watched)
    calls = watch(patch)
    for steps in (2, 4):
        train(load_settings(Path(sys.argv[1]), {"run.steps": steps}), silent)
        order.append(list(calls))
        calls.clear()
print("RESULT", json.dumps([enabled, *order]))
"""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    process = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(dataclasses.asdict(settings(tmp_path / "run", run__save_every=2, run__fsdp=True))))
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", script, str(file)]
    environment = {**os.environ, **process, "PYTHONPATH": path}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    enabled, first, resumed = json.loads(run.stdout.rsplit("RESULT", 1)[1])
    assert enabled == [False, False]  # by Trainer itself on the CPU: create_accelerator_and_postprocess is still needed
    assert first == [*START, *SAVE]
    assert resumed == [*START, "_load_from_checkpoint", "_load_optimizer_and_scheduler", *SAVE]
    assert (tmp_path / "run" / "checkpoint-4" / "optimizer.safetensors").exists()


def test_a_checkpoint_has_these_files_and_the_sum_of_the_losses_since_the_last_logged_step(
    settings, tmp_path, monkeypatch
):
    """`_save_checkpoint` sends it elsewhere by output_dir; files that are not known here would be sealed and copied.

    `_tr_loss` and `_globalstep_last_logged` are held to the losses of a run that logs every step.
    """
    train(settings(tmp_path / "every", run__steps=5, run__log_every=1))
    losses = {entry["step"]: entry["loss"] for entry in read_log(tmp_path / "every") if "loss" in entry}
    written = []
    inner = Trainer._save_checkpoint

    def watched(self, model, trial):
        inner(self, model, trial)
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        assert folder.parent == tmp_path / "third" / ".writing"
        written.append({file.name for file in folder.iterdir()})

    monkeypatch.setattr(Trainer, "_save_checkpoint", watched)
    train(settings(tmp_path / "third", run__steps=5, run__log_every=3, run__save_every=1, run__keep_checkpoints=9))
    model = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    state = {"optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json", "clock.json", "unlogged.json"}
    assert written == [{*model, *state, "training_args.bin"}] * 5
    expected = {1: (0, [1]), 2: (0, [1, 2]), 3: (3, []), 4: (3, [4]), 5: (5, [])}
    for step, (last_logged, since) in expected.items():
        folder = tmp_path / "third" / f"checkpoint-{step}"
        assert {file.name for file in folder.iterdir()} == {*model, *state, "sealed.json"}
        account = json.loads((folder / "unlogged.json").read_text())
        assert account["last_logged"] == last_logged
        assert account["loss"] == pytest.approx(sum(losses[i] for i in since), rel=1e-5, abs=1e-6)


def test_trainer_sets_the_sum_before_on_train_begin_and_uses_our_optimizer_and_schedule(
    settings, tmp_path, monkeypatch
):
    """The callback adds what was not logged before the checkpoint; a sum set to zero after it would lose that."""
    sums, seen = [], {}
    begin, save = trainer_module._UnloggedLoss.on_train_begin, RelposTrainer._save_checkpoint

    def watched_begin(self, args, state, control, **kwargs):
        begin(self, args, state, control, **kwargs)
        trainer = self.trainer
        sums.append((trainer._tr_loss.item(), trainer._globalstep_last_logged, trainer.state.global_step))

    def watched_save(self, model, trial):
        seen["groups"] = len(self.optimizer.param_groups)
        seen["optimizer"] = type(getattr(self.optimizer, "optimizer", self.optimizer)).__name__
        seen["rates"], seen["steps"] = self.lr_scheduler.get_last_lr(), self.lr_scheduler.last_epoch
        save(self, model, trial)

    monkeypatch.setattr(trainer_module._UnloggedLoss, "on_train_begin", watched_begin)
    monkeypatch.setattr(RelposTrainer, "_save_checkpoint", watched_save)
    for steps in (4, 5):
        rates = {"optimizer__position_lr": 0.5, "optimizer__warmup_steps": 0}
        own = settings(tmp_path, run__steps=steps, run__log_every=3, run__save_every=4, **rates)
        train(own)
    unlogged = json.loads((tmp_path / "checkpoint-4" / "unlogged.json").read_text())
    assert sums == [(0.0, 0, 0), (pytest.approx(unlogged["loss"]), unlogged["last_logged"], 4)]
    assert (seen["groups"], seen["optimizer"]) == (3, "AdamW")
    assert seen["steps"] == 5  # one step of the schedule per step of the optimizer, in spite of accumulation
    lowest = own.optimizer.final_lr_ratio
    assert seen["rates"] == pytest.approx([lowest * own.optimizer.lr, lowest * own.optimizer.lr, lowest * 0.5])
