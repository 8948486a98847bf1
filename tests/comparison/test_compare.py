"""Comparing encodings: what is held equal, resuming after a kill, several processes in a folder, and failed trials."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import yaml
from small_run import SMALL_RUN
from torch.nn import functional as F
from typer.testing import CliRunner
from waiting import gone, wait_until

from relpos.cli import app
from relpos.comparison.compare import LOCK, LOG, run_trials
from relpos.comparison.compare_options import ENCODINGS
from relpos.comparison.comparison import RECORD, Trial, load_comparison, make_comparison, read_record
from relpos.comparison.duration import too_few_units
from relpos.comparison.summary import make_table, notes, read_records
from relpos.runs.run import open_run
from relpos.training import trainer as trainer_module
from relpos.training.training import train

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("world")]
SHARED = {key: value for key, value in SMALL_RUN.items() if key != "model.encoding"}
WRONG = "kerple_log"  # a folder stands where its log would be written
LENGTHS = [16, 32]


@pytest.fixture(scope="module")
def shared(world):
    """Settings that all trials share; and threads of one, so that numbers are the same to the bit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 1)
        yield {**SHARED, "data.source": str(world / "text.txt")}


def test_the_default_encodings_are_those_that_the_family_supports(tmp_path, shared):
    for family, expected in (("gpt2", list(ENCODINGS)), ("bert", [name for name in ENCODINGS if name != "fire"])):
        comparison = make_comparison(tmp_path / family, settings={**shared, "model.family": family})
        assert comparison.encodings == expected


@pytest.fixture(scope="module")
def whole(world, shared):
    """A comparison that was never stopped; one of its encodings fails, and a second seed is added later."""
    out = world / "whole"
    make_comparison(out, ["alibi", "learned", WRONG], 1, LENGTHS, settings=shared)
    for seed in range(2):
        (out / Trial(WRONG, seed).name / "log.jsonl").mkdir(parents=True)
    assert [trial.encoding for trial in run_trials(out, workers=2)] == [WRONG]
    before = {file: file.stat().st_mtime_ns for file in out.glob("*-s0/*.*") if WRONG not in str(file)}
    assert len(before) > 10
    assert read_record(out, Trial(WRONG, 0))["attempts"] == 1
    make_comparison(out, seeds=2)
    assert [trial.name for trial in run_trials(out, workers=2)] == [Trial(WRONG, 0).name, Trial(WRONG, 1).name]
    # What is finished is kept, and what failed is tried again.
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert read_record(out, Trial(WRONG, 0))["attempts"] == 2
    return out


def test_records_without_their_models_are_kept_until_more_is_measured(world, whole):
    """As after a clone of records: models are too large to be stored beside them."""
    out, trial = world / "records", Trial("alibi", 0)
    (out / trial.name).mkdir(parents=True)
    for file in ("comparison.yaml", f"{trial.name}/{RECORD}"):
        shutil.copy(whole / file, out / file)
    data = yaml.safe_load((out / "comparison.yaml").read_text())
    (out / "comparison.yaml").write_text(yaml.safe_dump({**data, "encodings": ["alibi"], "seeds": 1}))
    before = read_record(out, trial)
    run_trials(out)
    assert read_record(out, trial) == before
    make_comparison(out, lengths=[48], last=True)
    run_trials(out)
    after = read_record(out, trial)
    assert after["training"]["loss"] == pytest.approx(before["training"]["loss"], rel=1e-4)  # once more
    assert [row["length"] for row in after["windows"]["rows"]] == [16, 32, 48]
    assert [row["length"] for row in after["last"]["rows"]] == [16, 32, 48]
    perplexities = [[row["perplexity"] for row in record["windows"]["rows"][:2]] for record in (before, after)]
    assert perplexities[1] == pytest.approx(perplexities[0], rel=0.01)  # other windows are scored now


def table_of(out: Path):
    comparison = load_comparison(out)
    records = read_records(comparison, out)
    return make_table(comparison, records), notes(comparison, records)


def main_process(out: Path) -> subprocess.Popen[bytes]:
    """The command in a process of its own, which hears Ctrl-C even where the tests run in the background."""
    code = """
import os, signal
os.cpu_count = lambda: 1
signal.signal(signal.SIGINT, signal.default_int_handler)
from relpos.cli import main
main()
"""
    return subprocess.Popen([sys.executable, "-c", code, "compare", "--out", str(out)])


def ended(*processes: subprocess.Popen[bytes]) -> list[int]:
    """How these processes ended; waits for them."""
    try:
        wait_until(lambda: all(process.poll() is not None for process in processes))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [process.returncode for process in processes]


def holder(out: Path, trial: Trial) -> int:
    return int((out / trial.name / LOCK).read_text().split()[1])


class TestAComparison:
    def test_trains_and_evaluates_every_encoding_with_every_seed(self, whole):
        for encoding in ("alibi", "learned"):
            for seed in range(2):
                record, folder = read_record(whole, Trial(encoding, seed)), whole / f"{encoding}-s{seed}"
                result = json.loads((folder / "result.json").read_text())
                assert result["step"] == record["training"]["step"] == SMALL_RUN["run.steps"]
                assert record["training"]["tokens_per_second"] > 0
                assert record["training"]["peak_memory_bytes"] > 50 * 2**20
                assert record["about"]["parameters"] > 10**6
                assert [row["length"] for row in record["windows"]["rows"]] == LENGTHS
                assert ("positions" in record) == (seed == 0)
                assert "\nstarting\n" in (folder / LOG).read_text()

    def test_tells_the_perplexity_that_the_model_has(self, whole):
        """Computed here by PyTorch, window by window."""
        run = open_run(whole / "alibi-s1")
        ids = torch.from_numpy(run.heldout().ids.astype("int64"))
        windows = [ids[start : start + 17] for start in range(0, (len(ids) - 1) // 32 * 32, 16)]
        with torch.no_grad():
            losses = [F.cross_entropy(run.model(window[None, :-1]).logits[0], window[1:]) for window in windows]
        rows = read_record(whole, Trial("alibi", 1))["windows"]["rows"]
        assert rows[0]["perplexity"] == pytest.approx(torch.stack(losses).mean().exp().item(), rel=1e-4)

    def test_shows_deviations_refused_lengths_and_failed_trials_in_its_table(self, whole):
        table, sentences = table_of(whole)
        assert table["alibi"][16].deviation > 0  # another seed has other numbers
        assert table["learned"][16].mean > 1
        assert (str(table["learned"][32]), str(table[WRONG][16])) == ("refused", "failed")
        for words in ("`learned` refused at 32: learned has 16 positions", f"`{WRONG}-s1` failed:"):
            assert any(words in sentence for sentence in sentences)
        assert "log.jsonl" in read_record(whole, Trial(WRONG, 1))["error"]
        assert "Traceback" in (whole / Trial(WRONG, 1).name / LOG).read_text()


def test_killed_in_the_middle_it_is_resumed_by_two_processes_with_the_same_table(world, shared, whole):
    """Each trial ends with the process that started it; its lock is taken over, and finished trials are kept."""
    out = world / "interrupted"
    make_comparison(out, ["alibi", "learned"], 1, LENGTHS, settings=shared)
    process = main_process(out)
    try:
        wait_until((out / "learned-s0" / "log.jsonl").exists)
    finally:
        process.kill()
        process.wait()
    dead = holder(out, Trial("learned", 0))
    wait_until(lambda: gone(dead), 60)
    finished = (out / "alibi-s0" / RECORD).stat().st_mtime_ns
    assert "windows" not in read_record(out, Trial("learned", 0))
    assert ended(main_process(out), main_process(out)) == [0, 0]
    assert holder(out, Trial("learned", 0)) != dead
    assert (out / "alibi-s0" / RECORD).stat().st_mtime_ns == finished
    assert (out / "alibi-s0" / LOG).read_text().count("\nstarting\n") == 1
    comparison = load_comparison(out)
    table, straight = (make_table(comparison, read_records(comparison, folder)) for folder in (out, whole))
    assert table == straight
    assert table["alibi"][32].mean > 1
    assert [read_record(out, trial)["attempts"] for trial in comparison.trials()] == [1, 1]
    log = (out / "learned-s0" / LOG).read_text()
    assert log.count("\nstarting\n") + log.count("\nresuming from") == 2  # once before the kill, once after


def test_a_trial_whose_process_is_killed_is_one_failed_row(world, shared):
    out = world / "killed"
    make_comparison(out, ["alibi"], 1, LENGTHS, settings=shared)
    said: list[str] = []
    thread = threading.Thread(target=lambda: run_trials(out, say=said.append))
    thread.start()
    lock = out / "alibi-s0" / LOCK
    wait_until(lambda: lock.exists() and lock.read_text())
    os.kill(holder(out, Trial("alibi", 0)), signal.SIGKILL)
    thread.join(120)
    assert "ended by SIGKILL" in read_record(out, Trial("alibi", 0))["error"]
    assert "1 of 1 trials, 1 failed" in said[-1]


def test_ctrl_c_stops_the_trials(world, shared):
    out = world / "stopped"
    make_comparison(out, ["alibi"], 1, LENGTHS, settings=shared)
    process = main_process(out)
    lock = out / "alibi-s0" / LOCK
    wait_until(lambda: lock.exists() and lock.read_text())
    process.send_signal(signal.SIGINT)
    assert ended(process) == [130]
    assert gone(holder(out, Trial("alibi", 0)))
    assert read_record(out, Trial("alibi", 0)) == {}


def test_encodings_start_alike_and_read_the_same_in_the_same_order(world, shared, monkeypatch):
    comparison = make_comparison(world / "alike", ["alibi", "cable", "learned"], 1, LENGTHS, settings=shared)
    seen: dict[str, list[torch.Tensor]] = {}
    starts: dict[str, dict[str, torch.Tensor]] = {}
    step = trainer_module.RelposTrainer.training_step

    def watched(self, model, inputs, *args, **kwargs):
        name = model.config.position["name"]
        starts.setdefault(name, {key: value.clone() for key, value in model.state_dict().items()})
        seen.setdefault(name, []).append(inputs["input_ids"].clone())
        return step(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(trainer_module.RelposTrainer, "training_step", watched)
    for trial in comparison.trials():
        train(comparison.settings_of(trial, world / "alike"))
    order = torch.stack(seen["alibi"])
    assert len(order) == 18  # two micro-batches a step
    assert not torch.equal(order[0], order[1])
    for name in ("cable", "learned"):
        assert torch.equal(torch.stack(seen[name]), order)
        common = starts[name].keys() & starts["alibi"].keys()
        assert len(common) > 40
        assert all(torch.equal(starts[name][key], starts["alibi"][key]) for key in common)


def test_a_trial_that_the_clock_ended_at_once_is_noted(tmp_path):
    comparison = make_comparison(tmp_path, ["alibi"], 1, settings={"run.minutes": 1.0})
    records = {Trial("alibi", 0): {"training": {"step": 1, "warning": "1 minutes were enough for 1 step only."}}}
    assert "`alibi-s0`: 1 minutes were enough for 1 step only." in notes(comparison, records)


def test_a_text_of_too_few_documents_for_tests_is_announced_with_what_is_enough(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    settings = {"data.source": str(texts), "data.tokenizer": "bpe-300", "run.steps": 1, "data.length": 64}

    def announced(documents: int, eval_tokens: int) -> str | None:
        for number in range(documents):
            (texts / f"{number}.txt").write_text(f"some words of document {number} " * 40)
        out = tmp_path / f"{documents}-{eval_tokens}"
        return too_few_units(make_comparison(out, ["alibi"], 1, [64], 64, eval_tokens, settings), out)

    few = announced(30, 64)  # too few documents are held out
    assert re.search(r"the 64 tokens that are scored are from [12] documents?: fewer than 10", few)
    assert "more text, has more" in few
    enough = int(re.search(r"--eval-tokens (\d+) reads enough", announced(300, 64))[1])
    assert announced(300, enough) is None
    assert announced(300, enough - 64) is not None


class TestMakingAComparison:
    def test_takes_every_encoding_once_before_any_again(self, tmp_path):
        trials = make_comparison(tmp_path, ["alibi", "rope"], 2).trials()
        assert [trial.name for trial in trials] == ["alibi-s0", "rope-s0", "alibi-s1", "rope-s1"]

    def test_goes_on_as_it_was_and_takes_more(self, tmp_path):
        first = make_comparison(tmp_path, ["alibi"], 1, [64], settings={"data.length": 32, "run.minutes": 2.0})
        assert first.lengths == [32, 64]
        assert make_comparison(tmp_path) == first
        more = make_comparison(tmp_path, ["rope:base=500000", "alibi"], 2, [128])
        assert more.encodings == ["alibi", "rope:base=500000"]
        assert (more.seeds, more.lengths, more.settings) == (2, [32, 64, 128], first.settings)
        assert load_comparison(tmp_path) == more
        assert make_comparison(tmp_path, eval_tokens=200_000).eval_tokens == 200_000
        make_comparison(tmp_path / "other", ["alibi"], settings={"run.steps": 10})
        make_comparison(tmp_path / "other", settings={"run.tokens": 10 * 2 * 256})  # the same end in other words

    @pytest.mark.parametrize(
        ("other", "sentence"),
        [
            ({"settings": {"run.steps": 11}}, "run.steps=10, but run.steps=11 was requested"),
            ({"settings": {"run.minutes": 3.0}}, "run.steps=10, but run.steps=None was requested"),
            ({"settings": {"data.length": 128}}, "data.length=256, but data.length=128 was requested"),
            ({"settings": {"optimizer.weight_decay": 0.5}}, "choose another --out"),
            ({"eval_tokens": 5}, "--eval-tokens 16384, and 5 are fewer: leave it out"),
            ({"encodings": ["rope:bass=3"]}, "unknown option of rope 'bass'"),
        ],
    )
    def test_another_comparison_in_the_folder_is_refused_and_nothing_is_lost(self, tmp_path, other, sentence):
        comparison = make_comparison(tmp_path, ["alibi"], settings={"run.steps": 10})
        with pytest.raises(ValueError, match=sentence):
            make_comparison(tmp_path, **other)
        assert load_comparison(tmp_path) == comparison

    @pytest.mark.parametrize(
        ("given", "sentence"),
        [
            ({"encodings": ["alibii"]}, "Did you mean 'alibi'?"),
            ({"encodings": ["alibi", ""]}, "encodings is empty"),
            ({"encodings": ["../alibi"]}, "is not an encoding"),
            ({"encodings": ["rope:base"]}, "key=value"),
            ({"encodings": ["alibi", "rope:bass=3"]}, "unknown option of rope 'bass'. Did you mean 'base'"),
            ({"encodings": ["alibi", "rope:base=-3"]}, "rope:base=-3 cannot be built: base must be a positive number"),
            ({"encodings": ["alibi", "rope:scaling=yran"]}, "Did you mean 'yarn'"),
            ({"encodings": ["alibi", "dape:base=rope"]}, "dape:base=rope cannot be built"),
            ({"settings": {"data.task": "recall"}}, "a comparison measures perplexity on text"),
            ({"settings": {"data.source": "/nowhere/a.txt"}}, "there is no file or folder /nowhere/a.txt"),
            ({"settings": {"data.tokenizer": "bpe-1"}}, "unknown tokenizer 'bpe-1'"),
            ({"seeds": 0}, "seeds must be at least 1"),
            ({"lengths": [256, 1]}, "lengths must be at least 2"),
            ({"settings": {"run.seed": 1}}, "what a comparison varies"),
            ({"settings": {"model.options.base": 1}}, "what a comparison varies"),
            ({"settings": {"run.stepss": 1}}, "Did you mean 'run.steps'"),
        ],
    )
    def test_what_is_wrong_is_said_before_anything_is_begun(self, tmp_path, given, sentence):
        with pytest.raises((ValueError, FileNotFoundError), match=sentence):
            make_comparison(tmp_path / "out", **given)
        assert not list(tmp_path.rglob("*.yaml"))

    def test_its_command_makes_it_again(self, tmp_path):
        comparison = make_comparison(tmp_path, ["alibi", "rope:base=500000"], 2, [512], settings={"run.minutes": 2.5})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("relpos.comparison.compare.run_trials", lambda *args, **kwargs: {})
            arguments = shlex.split(comparison.command(tmp_path / "again"))[1:]
            result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        again = load_comparison(tmp_path / "again")
        again.commands = comparison.commands
        assert again == comparison

    def test_no_comparison_in_a_folder_is_said(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="there is no comparison"):
            load_comparison(tmp_path)
        (tmp_path / "comparison.yaml").write_text("encodings: [alibi]")
        with pytest.raises(ValueError, match="does not describe a comparison"):
            load_comparison(tmp_path)
