"""Runs on a task: trained, gone on with, opened and scored."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import yaml
from interrupted_training import interrupted_after, same_weights
from small_run import SMALL_RUN
from task_scores import score_task
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import relpos
from relpos.cli import app
from relpos.evaluation import task_scoring as score_module
from relpos.evaluation.task_scoring import wilson
from relpos.models import RelposGPT2Config, RelposGPT2ForCausalLM
from relpos.runs.run import Run, open_run
from relpos.runs.settings import load_settings
from relpos.tasks import task
from relpos.tasks.windows import TaskWindows, task_tokenizer
from relpos.training.model_and_data import open_data
from relpos.training.training import train

pytestmark = pytest.mark.heavy

OF_TEXT = ("data.tokenizer", "model.dropout")
SMALL = {**{key: SMALL_RUN[key] for key in SMALL_RUN if key not in OF_TEXT}, "data.task": "copy"}
SMALL["model.encoding"] = "alibi"


def settings(out: Path, **overrides: object):
    return load_settings(
        None, {**SMALL, "run.out": str(out), **{k.replace("__", "."): v for k, v in overrides.items()}}
    )


def made(folder: Path, name: str, position: object, seed: int = 0, spread: float = 0.5) -> Run:
    """A small untrained model with the words of a task; weights spread far, so that it has opinions."""
    torch.manual_seed(seed)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": len(task(name).vocabulary)}
    config = RelposGPT2Config(**sizes, position=position, initializer_range=spread, tie_word_embeddings=spread < 0.1)
    folder.mkdir(exist_ok=True)
    return Run(folder, RelposGPT2ForCausalLM(config).eval(), task_tokenizer(task(name)), None, {}, {})


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder of a run that was never stopped."""
    out = tmp_path_factory.mktemp("tasks") / "straight"
    train(settings(out, model__dropout=0.1))
    return out


class TestARun:
    def test_says_which_task_and_opens_with_its_words(self, straight):
        written = yaml.safe_load((straight / "run.yaml").read_text())
        assert (written["data"]["task"], written["data"]["source"]) == ("copy", None)
        assert written["about"]["task"] == {"name": "copy", "hash": task("copy").digest, "words": 30}
        assert "corpus" not in written["about"]
        run = open_run(straight)
        assert (run.encoding, run.trained_length) == ("alibi", 16)
        tokenizer = transformers.AutoTokenizer.from_pretrained(straight)
        prompt = tokenizer("a b c d e |", return_tensors="pt")
        text = tokenizer.decode(run.model.generate(**prompt, max_new_tokens=5, do_sample=False)[0])
        assert text.startswith("a b c d e | ")
        assert len(text.split()) == 11
        for corpus in (None, "sotu"):
            with pytest.raises(ValueError, match="trained on the task copy and its vocabulary has no other words"):
                run.heldout(corpus)

    def test_interrupted_ends_bit_identical(self, straight, tmp_path):
        with interrupted_after(7):
            train(settings(tmp_path, model__dropout=0.1))
        train(settings(tmp_path, model__dropout=0.1))
        assert same_weights(tmp_path, straight)

    def test_with_more_steps_is_the_run_that_had_them_from_the_start(self, tmp_path):
        """The sequences do not depend on how many there will be; with a flat rate neither do the weights."""
        flat = {"optimizer__final_lr_ratio": 1.0, "optimizer__warmup_steps": 0}
        train(settings(tmp_path / "a", run__steps=3, **flat))
        train(settings(tmp_path / "a", run__steps=5, **flat))
        train(settings(tmp_path / "b", run__steps=5, **flat))
        assert same_weights(tmp_path / "a", tmp_path / "b")

    def test_sees_other_sequences_under_another_seed(self, tmp_path):
        one, other = (open_data(settings(tmp_path, run__seed=seed)).train[0]["input_ids"] for seed in (0, 1))
        assert one.tolist() != other.tolist()

    def test_refuses_to_resume_with_another_task_or_another_rule(self, straight, monkeypatch):
        with pytest.raises(ValueError, match=r"started with data\.task=copy, but"):
            train(settings(straight, model__dropout=0.1, data__task="flip_flop"))
        monkeypatch.setattr(type(task("copy")), "digest", "other")
        with pytest.raises(ValueError, match="the task copy has changed since"):
            train(settings(straight, model__dropout=0.1))


def test_a_small_model_learns_to_copy_what_it_never_saw(tmp_path):
    run = made(tmp_path, "copy", {"name": "rope"}, spread=0.02)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    before = score_task(run, "copy", [9], samples=50)["rows"][0]["accuracy"]
    for batch in DataLoader(TaskWindows(task("copy"), "train", 9, 80 * 32), batch_size=32):
        run.model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = score_task(run, "copy", [9], samples=50)["rows"][0]["accuracy"]
    assert before < 0.15
    assert after > 0.9


class TestScore:
    @pytest.mark.parametrize("name", ["flip_flop", "passkey"])
    def test_is_that_of_all_logits(self, tmp_path, name):
        """The same numbers from the logits of every position, a sequence at a time, in plain Python."""
        run = made(tmp_path, name, {"name": "alibi"})
        result = score_task(run, name, [64, 101], samples=23, seed=5, say=lambda text: None)
        for row in result["rows"]:
            right, exact = [], []
            for index in range(23):
                depth = index % 11 / 10 if name == "passkey" else None
                sample = task(name).draw(row["length"], 5, index, "heldout", depth)
                best = run.model(torch.from_numpy(sample.ids)[None]).logits[0].argmax(-1).tolist()
                asked = [i for i in range(row["length"]) if sample.answers[i]]
                found = [best[i - 1] == sample.ids[i] for i in asked]
                right += found
                exact.append(all(found))
            assert row["accuracy"] == pytest.approx(sum(right) / len(right))
            assert row["exact"] == pytest.approx(sum(exact) / len(exact))
            assert 0 < sum(right) < len(right)  # something to agree on
            assert (row["low"], row["high"]) == wilson(row["accuracy"], 23)

    def test_in_batches_is_that_of_one_by_one_and_by_depth_adds_up(self, tmp_path, monkeypatch):
        run = made(tmp_path, "passkey", {"name": "alibi"})
        result = score_task(run, "passkey", [64], samples=33, out=tmp_path / "a", say=lambda text: None)
        monkeypatch.setattr(score_module, "TOKENS", 100)
        assert score_task(run, "passkey", [64], samples=33, out=tmp_path / "b", say=lambda text: None) == result
        assert [row["depth"] for row in result["depths"]] == pytest.approx(np.arange(11) / 10)
        assert {row["samples"] for row in result["depths"]} == {3}
        assert np.mean([row["accuracy"] for row in result["depths"]]) == pytest.approx(result["rows"][0]["accuracy"])

    def test_has_the_sentence_of_an_encoding_that_refuses(self, tmp_path):
        run = made(tmp_path, "recall", {"name": "learned", "length": 64})
        rows = score_task(run, "recall", [128, 64], samples=3)["rows"]
        assert [row["length"] for row in rows] == [64, 128]
        assert rows[0]["error"] is None
        assert "learned has 64 positions" in rows[1]["error"]
        assert rows[1]["accuracy"] is None

    def test_is_kept_and_not_computed_again(self, tmp_path, monkeypatch):
        run, told = made(tmp_path, "copy", {"name": "alibi"}), []
        first = score_task(run, "copy", [20, 30], samples=5, say=told.append)
        lengths = []
        monkeypatch.setattr(
            score_module, "answers_right", lambda model, samples: lengths.append(len(samples[0].ids)) or [torch.ones(1)]
        )
        again = score_task(run, "copy", [30, 40, 20], samples=5)
        assert lengths == [40]
        assert [again["rows"][0], again["rows"][1]] == first["rows"]
        assert score_task(run, "copy", [20, 30], samples=5) == first
        score_task(run, "copy", [20], samples=5, seed=1)
        score_task(run, "copy", [20], samples=4)
        score_task(made(tmp_path, "copy", {"name": "alibi"}, seed=1), "copy", [20], samples=5)
        score_task(made(tmp_path, "copy", {"name": "alibi", "slopes": "press"}), "copy", [20], samples=5)
        assert lengths == [40, 20, 20, 20, 20]
        assert score_task(run, "copy", [20, 30], samples=5) == first
        (tmp_path / "evaluation" / "task-copy.json").write_text("{")
        score_task(run, "copy", [20], samples=5)
        assert lengths[-1] == 20
        assert len(lengths) == 6

    @pytest.mark.parametrize(
        ("name", "lengths", "samples", "sentence"),
        [
            ("recal", [64], 5, "Did you mean 'recall'"),
            ("recall", [64], 5, "does not have the words of recall"),
            ("copy", [64, 3], 5, "copy has at least 9 tokens, not 3"),
            ("copy", [], 5, "at least one length"),
            ("copy", [64], 0, "one sample, not 1 and 0"),
        ],
    )
    def test_refuses_what_cannot_be(self, tmp_path, name, lengths, samples, sentence):
        with pytest.raises(ValueError, match=sentence):
            score_task(made(tmp_path, "copy", {"name": "alibi"}), name, lengths, samples)
        assert not list(tmp_path.iterdir())


def test_wilson_is_that_of_the_book():
    """Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29; and all of 20, its mirror image."""
    book = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0.0, 0.1611), (1, 29): (0.0061, 0.1718)}
    for (right, count), bounds in book.items():
        assert wilson(right / count, count) == pytest.approx(bounds, abs=5e-5)
    assert wilson(1.0, 20) == pytest.approx((1 - 0.1611, 1.0), abs=5e-5)


class TestTheCommand:
    def test_prints_and_draws(self, tmp_path):
        out = tmp_path / "run"
        train(settings(out, data__task="passkey", data__length=40, run__steps=2, model__encoding="learned"))
        arguments = ["evaluate", str(out), "--task", "passkey", "--samples", "12"]
        done = CliRunner().invoke(app, [*arguments, "--lengths", "40,80"])
        assert done.exit_code == 0, done.output
        assert "40*" in done.stdout
        assert "learned has 40 positions" in done.stdout
        assert "run: passkey, 40 tokens" in done.stderr
        folder = out / "evaluation"
        names = [
            "task-passkey-lengths-40-80-samples-12-depths.png",
            "task-passkey-lengths-40-80-samples-12.png",
            "task-passkey.json",
        ]
        assert sorted(file.name for file in folder.iterdir()) == names
        assert sorted(done.stdout.splitlines()[-3:]) == [str(folder / name) for name in names]
        done = CliRunner().invoke(app, [*arguments, "--lengths", "40", "--json", "--out", str(tmp_path / "else")])
        assert json.loads(done.stdout)["rows"][0]["length"] == 40
        assert (tmp_path / "else" / "run" / "task-passkey.json").exists()

    def test_of_several_runs_prints_one_json_document(self, straight, tmp_path):
        other = tmp_path / "other"
        shutil.copytree(straight, other, ignore=shutil.ignore_patterns("checkpoint-*", "evaluation"))
        arguments = ["evaluate", str(straight), str(other), "--task", "copy", "--lengths", "16", "--samples", "2"]
        done = CliRunner().invoke(app, [*arguments, "--json", "--out", str(tmp_path / "both")])
        assert [result["task"] for result in json.loads(done.stdout)] == ["copy", "copy"]

    def test_where_every_length_is_refused_says_why_and_draws_nothing(self, tmp_path):
        out = tmp_path / "run"
        train(settings(out, run__steps=1, model__encoding="learned"))
        with pytest.raises(ValueError, match=r"nothing could be measured\. run, length 32: learned has 16 positions"):
            relpos.evaluate(out, task="copy", lengths=[32, 64], samples=2)
        assert not list((out / "evaluation").glob("*.png"))

    def test_goes_to_sixteen_times_the_trained_length_and_takes_no_options_of_text(self, straight):
        (result,) = relpos.evaluate(straight, task="copy", samples=2).results.values()
        assert [row["length"] for row in result["rows"]] == [16, 32, 64, 128, 256]
        for option in ({"protocol": "last"}, {"data": "sotu"}, {"eval_tokens": 5}, {"rope_scaling": "yarn"}):
            with pytest.raises(ValueError, match="a task is scored by its answers"):
                relpos.evaluate(straight, task="copy", **option)
