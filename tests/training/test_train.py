"""Training: what is left in the folder, going on after a kill, and what is refused."""

import dataclasses
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import yaml
from interrupted_training import WEIGHTS, interrupted_after, same_weights
from small_run import SMALL_RUN

import relpos
from relpos.encodings.clipped import Clipped
from relpos.models import RelposGPT2Config, RelposGPT2ForCausalLM
from relpos.runs.checkpoints import checkpoints, read_log
from relpos.runs.settings import OptimizerSettings
from relpos.system.files import Lock
from relpos.system.seal import damage
from relpos.text.corpus import open_corpus
from relpos.text.tokenizers import load_tokenizer
from relpos.text.tokens import Windows, tokenize
from relpos.training import trainer as trainer_module
from relpos.training.trainer import Clock, parameter_groups, schedule
from relpos.training.training import train

STEPS = SMALL_RUN["run.steps"]
pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("world")]


@pytest.fixture(scope="module")
def straight(world, settings):
    """The folder of a run that was never stopped."""
    train(settings(world / "straight"))
    return world / "straight"


def untimed_log(out: Path) -> list[dict[str, float]]:
    timed = ("seconds", "tokens_per_second")
    return [{key: value for key, value in entry.items() if key not in timed} for entry in read_log(out)]


class TestARun:
    def test_learns_and_says_what_it_was(self, straight):
        result = json.loads((straight / "result.json").read_text())
        assert result["heldout"] < result["heldout_at_start"] - 0.1
        assert (result["step"], result["tokens"]) == (STEPS, STEPS * 4 * 16)
        assert "warning" not in result
        about = yaml.safe_load((straight / "run.yaml").read_text())
        assert about["run"]["seed"] == 0
        assert about["about"]["versions"]["relpos"] == relpos.__version__
        assert about["about"]["versions"]["torch"] == torch.__version__
        assert len(about["about"]["corpus"]["hash"]) == 64

    def test_begins_with_one_line_of_settings_or_with_all_of_them(self, straight, settings):
        """It is finished already: nothing is trained."""
        parameters = yaml.safe_load((straight / "run.yaml").read_text())["about"]["parameters"]
        short, long = [], []
        train(settings(straight), short.append)
        assert short[0].startswith(f"cable in GPT-2 nano ({parameters:,} parameters), ")
        assert short[0].endswith(
            f"16 tokens × 4 windows per step, {STEPS} steps, lr 0.002, seed 0. All settings: {straight / 'run.yaml'}"
        )
        assert "\n" not in short[0]
        train(settings(straight), long.append, verbose=True)
        assert long[0] == (straight / "run.yaml").read_text()
        assert long[1:] == short[1:]

    def test_leaves_a_folder_that_the_auto_classes_open(self, straight):
        model = transformers.AutoModelForCausalLM.from_pretrained(straight)
        tokenizer = transformers.AutoTokenizer.from_pretrained(straight)
        assert type(model) is RelposGPT2ForCausalLM
        assert model.config.position == {"name": "cable"}
        prompt = tokenizer("word4 and", return_tensors="pt")
        assert model.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] > prompt["input_ids"].shape[1]

    def test_logs_every_step_and_evaluation_and_keeps_two_complete_checkpoints(self, straight):
        entries = read_log(straight)
        assert [entry["step"] for entry in entries if "loss" in entry] == list(range(1, STEPS + 1))
        assert [entry["step"] for entry in entries if "heldout" in entry] == [0, 4, 8, 9]
        assert all(entry["tokens_per_second"] > 0 for entry in entries if "loss" in entry)
        assert list((straight / "tensorboard").glob("events*"))
        assert (straight / "loss.png").read_bytes()[:4] == b"\x89PNG"
        assert [folder.name for folder in checkpoints(straight)] == ["checkpoint-9", "checkpoint-6"]
        assert all(damage(folder) is None for folder in checkpoints(straight))
        assert not list(straight.rglob("training_args.bin"))  # a pickle
        assert not list(straight.rglob("*.part")) + list(straight.glob(".writing"))

    def test_shows_of_which_step_a_heldout_loss_is_and_given_again_trains_no_more(self, settings, tmp_path, capsys):
        train(settings(tmp_path, run__steps=6))
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
        entries = read_log(tmp_path)
        heldout = {entry["step"]: f"heldout {entry['heldout']:.4f}" for entry in entries if "heldout" in entry}
        assert [line.split("  ")[0] for line in lines] == [f"step {entry['step']}/6" for entry in entries]
        for line, entry in zip(lines, entries, strict=True):
            last = max((step for step in heldout if step < entry["step"]), default=0)
            words = heldout[entry["step"]] if "heldout" in entry else f"{heldout[last]} (step {last})"
            assert words in line.split("  ")
        before = (tmp_path / WEIGHTS).stat().st_mtime_ns
        train(settings(tmp_path, run__steps=6))
        assert "is already finished at step 6" in capsys.readouterr().out
        assert (tmp_path / WEIGHTS).stat().st_mtime_ns == before

    def test_predicts_the_loss_that_the_model_has(self, straight, settings):
        """The logged held-out loss is that of the saved model on the same windows, computed here by PyTorch."""
        corpus = open_corpus(settings(straight).data.source)
        windows = Windows(tokenize(corpus, load_tokenizer("bpe-280", corpus))["heldout"], 16, limit=4)
        model = RelposGPT2ForCausalLM.from_pretrained(straight).eval()
        with torch.no_grad():
            logits = torch.cat([model(window["input_ids"][None]).logits[0] for window in windows])
        targets = torch.cat([window["labels"][1:] for window in windows])
        expected = torch.nn.functional.cross_entropy(logits, targets).item()
        assert json.loads((straight / "result.json").read_text())["heldout"] == pytest.approx(expected, abs=1e-4)


class TestGoingOn:
    def test_after_an_interruption_ends_bit_identical(self, straight, settings, tmp_path):
        with interrupted_after(7):
            train(settings(tmp_path))
        train(settings(tmp_path))
        assert same_weights(tmp_path, straight)
        assert untimed_log(tmp_path) == untimed_log(straight)

    @pytest.mark.parametrize("step", [1, 4])
    def test_logs_what_a_run_never_stopped_logs(self, straight, settings, tmp_path, step):
        """Lines every 5 steps, checkpoints every 3: a line is the mean of steps before and after the checkpoint."""
        with interrupted_after(step):
            train(settings(tmp_path, run__log_every=5))
        train(settings(tmp_path, run__log_every=5))
        every = {entry["step"]: entry["loss"] for entry in read_log(straight) if "loss" in entry}
        means = {5: sum(every[i] for i in range(1, 6)) / 5, 9: sum(every[i] for i in range(6, 10)) / 4}
        assert {e["step"]: e["loss"] for e in read_log(tmp_path) if "loss" in e} == pytest.approx(means, rel=1e-6)
        heldout = [[e for e in untimed_log(folder) if "heldout" in e] for folder in (tmp_path, straight)]
        assert heldout[0] == heldout[1]
        assert same_weights(tmp_path, straight)

    def test_after_a_kill_while_a_checkpoint_is_written_ends_bit_identical(self, straight, settings, tmp_path):
        code = f"""
import os, signal, torch
torch.set_num_threads(1)
from relpos.runs.settings import load_settings
from relpos.training import trainer
from relpos.training.training import train
install, calls = trainer.install, []
def killed(*args):
    calls.append(args)
    if len(calls) == 2: os.kill(os.getpid(), signal.SIGKILL)
    install(*args)
trainer.install = killed
train(load_settings({str(tmp_path / "run.yaml")!r}, {{}}))
"""
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(dataclasses.asdict(settings(tmp_path / "out"))))
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert run.returncode == -signal.SIGKILL, run.stderr
        out = tmp_path / "out"
        assert [folder.name for folder in checkpoints(out)] == ["checkpoint-3"]
        assert (out / ".writing" / "checkpoint-6" / WEIGHTS).exists()
        train(settings(out))
        assert same_weights(out, straight)

    def test_passes_over_a_truncated_checkpoint_and_names_it(self, straight, settings, tmp_path, capsys):
        with interrupted_after(7):
            train(settings(tmp_path))
        newest = tmp_path / "checkpoint-6" / "optimizer.pt"
        newest.write_bytes(newest.read_bytes()[:1000])
        train(settings(tmp_path))
        printed = capsys.readouterr().out
        assert "checkpoint-6 is damaged and is skipped: optimizer.pt has 1000 bytes" in printed
        assert f"resuming from {tmp_path}/checkpoint-3" in printed
        assert same_weights(tmp_path, straight)
        assert damage(tmp_path / "checkpoint-6") is None

    def test_after_a_full_disk_ends_bit_identical(self, straight, settings, tmp_path, monkeypatch):
        """Files may grow to 1 MB only from the second checkpoint on: the kernel refuses, as it does on a full disk."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        install = trainer_module.install

        def then_full(*args):
            install(*args)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))

        monkeypatch.setattr(trainer_module, "install", then_full)
        try:
            with pytest.raises(OSError, match="checkpoint-6 could not be written") as caught:
                train(settings(tmp_path))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "The last complete checkpoint is checkpoint-3" in str(caught.value)
        assert damage(tmp_path / "checkpoint-3") is None
        assert not (tmp_path / ".writing").exists()
        monkeypatch.undo()
        train(settings(tmp_path))
        assert same_weights(tmp_path, straight)

    def test_killed_before_the_result_is_written_only_finishes_and_with_more_steps_trains_on(
        self, straight, settings, tmp_path
    ):
        out = tmp_path / "out"
        shutil.copytree(straight, out)
        (out / "result.json").unlink()
        (out / WEIGHTS).unlink()
        assert train(settings(out))["step"] == STEPS
        assert same_weights(out, straight)
        assert train(settings(out, run__steps=11))["step"] == 11

    @pytest.mark.slow
    def test_killed_again_and_again_at_any_moment_ends_bit_identical(self, settings, tmp_path):
        more = {"run__steps": 60, "run__save_every": 2}
        train(settings(tmp_path / "straight", **more))
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(dataclasses.asdict(settings(tmp_path / "out", **more))))
        code = "import torch; torch.set_num_threads(1); from relpos.cli import main; main()"
        command = [sys.executable, "-c", code, "train", "--config", str(file)]
        log, kills = tmp_path / "out" / "log.jsonl", 0
        while kills < 6:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            lines = len(log.read_text().splitlines()) if log.exists() else 0
            while process.poll() is None and (not log.exists() or len(log.read_text().splitlines()) < lines + 5):
                time.sleep(0.02)
            time.sleep(0.037 * kills)
            process.kill()
            if process.wait() == 0:
                break
            kills += 1
        assert kills >= 3
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        assert same_weights(tmp_path / "out", tmp_path / "straight")


class TestRefusals:
    def test_a_second_run_in_the_folder(self, settings, tmp_path):
        with Lock(tmp_path), pytest.raises(ValueError, match=r"is being trained by process \d+ on"):
            train(settings(tmp_path))

    def test_but_not_the_lock_of_a_process_that_is_dead(self, tmp_path):
        lock = f"from relpos.system.files import Lock; Lock(pathlib.Path({str(tmp_path)!r})).__enter__()"
        script = f"import os, pathlib, signal; {lock}; os.kill(os.getpid(), signal.SIGKILL)"
        subprocess.run([sys.executable, "-c", script], check=False)
        assert "process" in (tmp_path / ".lock").read_text()
        with Lock(tmp_path):
            pass

    def test_other_settings_in_the_folder(self, straight, settings):
        sentence = "was started with optimizer.lr=0.002, but optimizer.lr=0.5 was requested: give the same settings"
        with pytest.raises(ValueError, match=sentence):
            train(settings(straight, optimizer__lr=0.5))

    def test_a_text_that_has_changed(self, straight, settings, tmp_path):
        other = tmp_path / "text.txt"
        other.write_text("another text altogether\n" * 60)
        shutil.copytree(straight, tmp_path / "out")
        saved = (tmp_path / "out" / "run.yaml").read_text()
        old = settings(straight).data.source
        (tmp_path / "out" / "run.yaml").write_text(saved.replace(old, str(other)))
        with pytest.raises(ValueError, match="has changed since"):
            train(settings(tmp_path / "out", data__source=str(other)))

    def test_a_loss_that_is_no_number(self, settings, tmp_path):
        rates = {"optimizer__lr": 1e30, "optimizer__max_grad_norm": 1e9, "optimizer__warmup_steps": 0}
        with pytest.raises(ValueError, match=r"is nan at step \d+: the learning rate may be too high"):
            train(settings(tmp_path, model__encoding="alibi", **rates))


class TestTheEnd:
    def test_always_has_a_loss(self, settings, tmp_path):
        result = train(settings(tmp_path, run__steps=2, run__log_every=1000))
        assert [entry["step"] for entry in read_log(tmp_path) if "loss" in entry] == [2]
        assert 3 < result["loss"] < 7

    @pytest.mark.parametrize(("seconds", "steps"), [(2.0, 1), (42.0, 21)])
    def test_can_be_a_time(self, settings, tmp_path, monkeypatch, capsys, seconds, steps):
        """By a clock on which every micro-batch takes a second, and nothing else any time: two seconds per step."""
        now, step = 0.0, trainer_module.RelposTrainer.training_step

        def one_second(*args, **kwargs):
            nonlocal now
            now += 1.0
            return step(*args, **kwargs)

        monkeypatch.setattr(trainer_module.RelposTrainer, "training_step", one_second)
        monkeypatch.setattr("relpos.training.trainer.time", SimpleNamespace(monotonic=lambda: now))
        result = train(settings(tmp_path, run__steps=None, run__minutes=seconds / 60, run__log_every=1000))
        assert (result["step"], result["seconds"]) == (steps, 2.0 * steps)
        assert damage(tmp_path / f"checkpoint-{steps}") is None
        # The learning rate rises over 20 steps: a run that does not get there is none to judge an encoding by.
        warning = f"were enough for {steps} step{'s' * (steps > 1)} only, and the learning rate rises over the first 20"
        assert (warning in result.get("warning", "")) == (steps < 20)
        assert (f"warning: {seconds / 60:g} minutes {warning}" in capsys.readouterr().out) == (steps < 20)


def test_the_rate_follows_the_clock_or_the_steps():
    clock = Clock(minutes=1.0)
    share = schedule(OptimizerSettings(lr=1.0, final_lr_ratio=0.1, warmup_steps=4), None, clock)
    assert [share(step) for step in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    clock.fraction = 0.5
    assert share(10) == pytest.approx(0.55)
    clock.fraction = 1.2
    assert share(11) == pytest.approx(0.1)
    share = schedule(OptimizerSettings(final_lr_ratio=0.1, warmup_steps=10), 110, Clock(None))
    assert [share(step) for step in (10, 60, 110)] == pytest.approx([1.0, 0.55, 0.1])
    share = schedule(OptimizerSettings(warmup_steps=4, warmup_reaches_lr=True), 40, Clock(None))
    assert [share(step) for step in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_the_parameters_of_an_encoding_are_a_group_of_their_own():
    model = RelposGPT2ForCausalLM(RelposGPT2Config.preset("nano", vocab_size=300, position="fire"))
    settings = OptimizerSettings(lr=1e-3, weight_decay=0.1, position_lr=1e-2, position_weight_decay=0.05)
    matrices, vectors, own = parameter_groups(model, settings)
    assert (matrices["weight_decay"], vectors["weight_decay"], own["weight_decay"]) == (0.1, 0.0, 0.05)
    assert (matrices["lr"], own["lr"]) == (1e-3, 1e-2)
    assert len(own["params"]) == 4 * len(list(model.config.make_position().parameters()))
    assert sum(len(group["params"]) for group in (matrices, vectors, own)) == len(list(model.parameters()))
    assert parameter_groups(model, OptimizerSettings(lr=1e-3))[2]["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("position", "decayed"),
    [
        ("cable", {"steps.weight", "weights.weight"}),
        ("fire", {"inner.weight", "outer.weight"}),
        ({"name": "kerple_log", "clamped": True}, {"r1.raw", "r2.raw"}),
        ("kerple_log", set()),
        ("clipped", {"table"}),
    ],
)
def test_weight_decay_may_be_that_of_an_encodings_matrices(position, decayed):
    model = RelposGPT2ForCausalLM(RelposGPT2Config.preset("nano", vocab_size=300, position=position))
    settings = OptimizerSettings(lr=1e-3, position_lr=1e-2, position_weight_decay=0.05, position_decay="matrices")
    groups = parameter_groups(model, settings)
    own = dict(model.config.make_position().named_parameters())
    found = {id(p): group for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(found) == len(list(model.parameters()))
    for layer in model.transformer.h:
        for name in own:
            group = found[id(layer.attn.position.get_parameter(name))]
            assert (group["lr"], group["weight_decay"]) == (1e-2, 0.05 if name in decayed else 0.0), name


@pytest.mark.parametrize("name", ["clipped", {"name": "sum", "parts": ["clipped", "t5"]}])
def test_tables_of_distances_have_a_rate_and_an_epsilon_of_their_own(name):
    model = RelposGPT2ForCausalLM(RelposGPT2Config.preset("nano", vocab_size=300, position=name))
    settings = OptimizerSettings(lr=1e-3, position_lr=1e-2, table_lr=0.1, table_eps=1e-4)
    optimizer = torch.optim.AdamW(parameter_groups(model, settings), eps=1e-8)
    *others, tables = optimizer.param_groups
    assert (tables["lr"], tables["eps"], tables["weight_decay"]) == (0.1, 1e-4, 0.0)
    assert {id(parameter) for parameter in tables["params"]} == {
        id(module.table)
        for module in model.modules()
        if isinstance(module, Clipped)  # t5 has buckets
    }
    assert len(tables["params"]) == 4
    assert [group["eps"] for group in others] == [1e-8] * len(others)
    assert parameter_groups(model, OptimizerSettings(lr=1e-3, position_lr=1e-2))[-1]["lr"] == 1e-2
