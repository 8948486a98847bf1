"""Evaluation: every protocol against plain loops over whole logits, resuming after a kill, and what is refused."""

import itertools
import json
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from relpos.cli import app
from relpos.evaluation import evaluation, protocols, scoring
from relpos.evaluation.evaluate import evaluate as evaluate_runs
from relpos.evaluation.evaluation import default_lengths, evaluate, question_stem
from relpos.evaluation.intervals import Units, bin_edges, bootstrap, interval, unit_sums, units_of
from relpos.runs.run import open_run
from relpos.tasks import task
from relpos.tasks.windows import task_tokenizer
from relpos.text.tokenizers import gpt2_tokenizer, token_bytes
from relpos.text.tokens import Tokens
from relpos.training.training import train

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("world")]
LENGTHS = [16, 32, 64]  # trained at the first
WORK = ("seconds", "tokens_per_second", "peak_memory_bytes")
APART = {"data__separate_documents": True}


@pytest.fixture(scope="module")
def corpus(world):
    """Documents of 10 to 700 tokens; chance holds out about one in ten."""
    chance = random.Random(1)
    words = [f"{a}{b}" for a in ("ka", "lo", "mir", "tes") for b in ("", "na", "ri", "do")]
    lines = []
    for number in range(90):
        text = " ".join(chance.choice(words) for _ in range(5 if number % 9 == 0 else chance.randrange(40, 220)))
        lines.append(json.dumps({"text": f"{number} {text}."}))
    (world / "documents.jsonl").write_text("\n".join(lines))
    return str(world / "documents.jsonl")


@pytest.fixture(scope="module")
def folder(world, settings, corpus):
    """Folders of runs, each trained when first asked for."""

    def make(encoding, **more):
        out = world / "-".join([encoding, *more])
        if not out.exists():
            train(settings(out, model__encoding=encoding, data__source=corpus, **more))
        return out

    return make


@pytest.fixture(scope="module")
def rope(folder):
    return open_run(folder("rope"))


@pytest.fixture(scope="module")
def text(rope):
    heldout = rope.heldout()
    assert len(heldout.starts) >= 5
    return heldout


@pytest.fixture
def ask(tmp_path):
    """Evaluate into a folder of its own, and print nothing."""

    def evaluate_there(run, lengths, protocol="windows", **options):
        return evaluate(run, lengths, protocol, **{"out": tmp_path, "say": str, **options})

    return evaluate_there


def command(*arguments):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def borders(text):
    return list(zip(text.starts, [*text.starts[1:], len(text)], strict=True))


@torch.no_grad()
def direct(run, text, start, length):
    """The loss of each token after the first, by its place, from whole logits."""
    ids = torch.from_numpy(np.array(text.ids[start : start + length + 1], dtype=np.int64))
    logits = run.model(ids[None, :-1]).logits[0].double()  # (length, vocabulary)
    losses = F.cross_entropy(logits, ids[1:], reduction="none")
    return {start + 1 + i: loss for i, loss in enumerate(losses.tolist())}


def in_windows(run, text, length, longest=64):
    """The losses of non-overlapping windows, of blocks of the longest length."""
    starts = range(0, (len(text) - 1) // longest * longest, length)
    return {place: loss for start in starts for place, loss in direct(run, text, start, length).items()}


def of_last_tokens(run, text, length):
    """The losses of the last 8 tokens of 10 windows inside documents, spread over the text."""
    ends = [end for begin, stop in borders(text) for end in range(begin + 64, stop, 8)]
    chosen = [ends[i * len(ends) // 10] for i in range(10)]
    losses = {end: direct(run, text, end - length, length) for end in chosen}
    return {place: losses[end][place] for end in chosen for place in range(end - 7, end + 1)}


def of_sliding_windows(run, text, length):
    """The losses in windows that move by 6 over 3 blocks of 32 tokens, each token in the first that has it."""
    losses, count = {}, (len(text) - 1) // 32 - 1
    for block in [32 * (1 + i * count // 3) for i in range(3)]:
        for end in [*range(block + 6, block + 32, 6), block + 32]:
            window = direct(run, text, end - length, length)
            losses |= {place: window[place] for place in window if block < place and place not in losses}
    return losses


def mean(losses):
    return sum(losses.values()) / len(losses)


@pytest.mark.parametrize(
    ("protocol", "lengths", "options", "direct_losses"),
    [
        ("windows", LENGTHS, {}, in_windows),
        ("last", LENGTHS, {"last": 8, "eval_tokens": 80}, of_last_tokens),
        ("sliding", [16, 32], {"stride": 6, "eval_tokens": 96}, of_sliding_windows),
    ],
)
def test_a_protocol_has_the_mean_loss_over_its_windows(
    rope, text, tmp_path, ask, protocol, lengths, options, direct_losses
):
    result = ask(rope, lengths, protocol, **options)
    for row in result["rows"]:
        losses = direct_losses(rope, text, row["length"])
        assert row["tokens"] == len(losses) == options.get("eval_tokens", (len(text) - 1) // 64 * 64)
        assert row["loss"] == pytest.approx(mean(losses), rel=1e-5)
        assert row["perplexity"] == pytest.approx(np.exp(mean(losses)), rel=1e-5)
        assert row["low"] < row["perplexity"] < row["high"]
    assert result["trained_length"] == 16
    assert json.loads((tmp_path / result["file"]).read_text()) == result


class TestWindows:
    def test_know_the_document_of_every_token(self, rope, text, ask):
        row = ask(rope, [16])["rows"][0]
        losses = in_windows(rope, text, 16, longest=16)
        by_document = [[losses[i] for i in losses if begin <= i < end] for begin, end in borders(text)]
        assert row["documents"] == sum(map(bool, by_document))
        assert row["units"]["tokens"] == [len(document) for document in by_document if document]
        np.testing.assert_allclose(row["units"]["loss"], [sum(losses) for losses in by_document if losses], rtol=1e-5)

    def test_of_a_run_that_keeps_documents_apart_do_so(self, folder, text, ask):
        run = open_run(folder("alibi", **APART))
        row = ask(run, [64])["rows"][0]
        losses, total = {}, (len(text) - 1) // 64 * 64
        for start in range(0, total, 64):
            cuts = [start, *(int(s) for s in text.starts if start < s < start + 64), start + 64]
            for begin, end in itertools.pairwise(cuts):
                losses |= direct(run, text, begin, end - begin)
        losses = {place: loss for place, loss in losses.items() if place not in text.starts}
        assert row["tokens"] == len(losses)
        assert row["loss"] == pytest.approx(mean(losses), rel=1e-5)
        sizes, starts = token_bytes(run.tokenizer), set(text.starts.tolist())
        assert row["bytes"] == sum(int(sizes[text.ids[i]]) for i in range(1, total + 1) if i not in starts)

    def test_few_of_them_are_spread_over_the_text_and_the_same_at_every_length(self, text):
        plan = protocols.windows(text, LENGTHS, tokens=256)
        scored = [
            {place for window in plan.windows[length] for place in range(window.first, window.start + length + 1)}
            for length in LENGTHS
        ]
        assert scored[0] == scored[1] == scored[2]
        assert len(scored[0]) == 256
        assert max(scored[0]) > 0.7 * len(text)

    def test_of_lengths_that_do_not_divide_stay_in_the_same_blocks(self):
        text = Tokens(np.zeros(1001, dtype=np.uint16), np.array([0]))
        plan = protocols.windows(text, [30, 100], tokens=10**6)
        assert len(plan.windows[100]) == 10
        assert [window.start for window in plan.windows[30][:4]] == [0, 30, 60, 100]


def test_last_scores_the_same_tokens_at_every_length(text):
    plan = protocols.last(text, LENGTHS, tokens=10**6, scored=8)
    for length in LENGTHS:
        scored = [range(window.first, window.start + length + 1) for window in plan.windows[length]]
        assert all(len(places) == 8 for places in scored)
        places = [place for window in scored for place in window]
        assert len(set(places)) == len(places)  # none twice
        assert places == [place for w in plan.windows[16] for place in range(w.first, w.start + 17)]
        for window in plan.windows[length]:  # the whole window, and the token after it, in one document
            assert any(begin <= window.start and window.start + length < end for begin, end in borders(text))
    assert len(plan.windows[16]) > 20


@pytest.mark.parametrize("stride", [None, 5])
def test_sliding_scores_each_token_once_with_enough_before_it(text, stride):
    plan = protocols.sliding(text, LENGTHS, 10**6, stride)
    everywhere = None
    for length in LENGTHS:
        places = []
        for window in plan.windows[length]:
            places += range(window.first, window.start + length + 1)
            assert window.start >= 0
            assert window.first - window.start > length - (stride or length // 2)
        assert len(set(places)) == len(places)
        everywhere = everywhere or places
        assert places == everywhere
    assert len(everywhere) == ((len(text) - 1) // 64 - 1) * 64


class TestPositions:
    def test_have_the_loss_of_each_bin_and_the_control_that_sees_less(self, rope, text, ask):
        result = ask(rope, [64], "positions", stride=3)
        starts = [start for begin, end in borders(text) for start in range(begin, end - 64, 64)]
        whole, control = {}, {}
        for start in starts:
            whole |= {(start, place - start - 1): loss for place, loss in direct(rope, text, start, 64).items()}
            for end in [*range(start + 16, start + 64, 3), start + 64]:
                window = direct(rope, text, end - 16, 16)
                control = {(start, place - start - 1): window[place] for place in window} | control  # the earlier stays
        assert len(control) == len(whole) == 64 * len(starts)
        assert [(b["from"], b["to"]) for b in result["bins"]] == [(0, 16), (16, 23), (23, 32), (32, 45), (45, 64)]
        for entry in result["bins"]:
            inside = [key for key in whole if entry["from"] <= key[1] < entry["to"]]
            assert entry["tokens"] == len(inside)
            assert entry["loss"] == pytest.approx(np.mean([whole[key] for key in inside]), rel=1e-5)
            assert entry["control"] == pytest.approx(np.mean([control[key] for key in inside]), rel=1e-5)
            assert entry["difference"] == pytest.approx(entry["loss"] - entry["control"])
            assert entry["low"] < entry["loss"] < entry["high"]
            assert entry["difference_low"] <= entry["difference"] + 1e-9
        assert abs(result["bins"][0]["difference"]) < 1e-5  # as far as the model was trained they see the same
        assert abs(result["bins"][-1]["difference"]) > 1e-5
        assert result["rows"][0]["loss"] == pytest.approx(mean(whole), rel=1e-5)
        assert result["rows"][0]["control_loss"] == pytest.approx(mean(control), rel=1e-5)

    def test_bins_end_at_the_length(self):
        assert bin_edges(8).tolist() == [0, 8]
        assert bin_edges(16).tolist() == [0, 16]
        assert bin_edges(100).tolist() == [0, 16, 23, 32, 45, 64, 91, 100]
        assert 256 in bin_edges(8192)


def without_work(result):
    rows = [{key: value for key, value in row.items() if key not in WORK} for row in result["rows"]]
    return {**result, "rows": rows}


class TestResuming:
    @pytest.fixture(autouse=True)
    def _small_batches(self, monkeypatch):
        monkeypatch.setattr(scoring, "AT_ONCE", 64)

    @pytest.fixture
    def computed(self, monkeypatch):
        """The batches that were computed."""
        batches, cells = [], scoring.Scorer._cells
        monkeypatch.setattr(scoring.Scorer, "_cells", lambda *args: batches.append(args[1]) or cells(*args))
        return batches

    def test_after_a_kill_in_the_middle_of_a_line_ends_identical(self, rope, ask, computed, tmp_path):
        straight = ask(rope, LENGTHS, eval_tokens=512, out=tmp_path / "straight")
        code = f"""
import json, os, signal, torch
from pathlib import Path
torch.set_num_threads(1)
from relpos.evaluation import scoring
from relpos.evaluation.evaluation import evaluate
from relpos.runs.run import open_run
scoring.AT_ONCE = 64
append, lines = scoring._append, 0
def cut_short(file, entry):
    global lines
    lines += 1
    if lines == 11:
        text = json.dumps(entry)
        with file.open("a") as handle:
            handle.write(text[: len(text) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    append(file, entry)
scoring._append = cut_short
evaluate(open_run({str(rope.folder)!r}), {LENGTHS}, eval_tokens=512, out=Path({str(tmp_path / "killed")!r}))
"""
        ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        parts = tmp_path / "killed" / "parts"
        assert sum(len(file.read_text().splitlines()) for file in parts.iterdir()) == 11
        assert not list((tmp_path / "killed").glob("*.json"))
        computed.clear()
        resumed = ask(rope, LENGTHS, eval_tokens=512, out=tmp_path / "killed")
        assert len(computed) == 8 + 8 + 8 - 10
        again = ask(rope, LENGTHS, eval_tokens=512, out=tmp_path / "killed")
        assert len(computed) == 8 + 8 + 8 - 10  # nothing was written onto the line that was cut
        assert without_work(resumed) == without_work(again) == without_work(straight)

    def test_computes_what_is_not_finished_and_never_uses_another_model(self, rope, folder, ask, computed):
        first = ask(rope, [16], eval_tokens=256)
        computed.clear()
        assert ask(rope, [16], eval_tokens=256) == first
        assert not computed
        ask(rope, [16], eval_tokens=128)  # another question
        assert len(computed) == 2
        other = ask(open_run(folder("rope") / "checkpoint-6"), [16], eval_tokens=256)
        assert other["rows"][0]["loss"] != first["rows"][0]["loss"]


def test_all_tokens_or_the_fewest_can_be_asked_for_and_what_will_be_done_is_said_first(rope, text, ask, tmp_path):
    blocks = (len(text) - 1) // 64
    assert ask(rope, [16, 64], eval_tokens="all")["rows"][0]["tokens"] == blocks * 64
    lines = []
    quick = evaluate_runs(rope, quick=True, out=tmp_path, say=lines.append).results["rope"]
    assert [row["length"] for row in quick["rows"]] == [16, 64]  # 256 is longer than the longest document
    tokens = min(2**14, len(text))
    assert lines[0].startswith(f"rope: windows, 2 lengths from 16 to 64, {tokens:,} of {len(text):,} tokens of ")


def test_the_time_left_of_a_second_run_counts_from_its_own_first_window(rope, folder, tmp_path, monkeypatch):
    """It counted from before the first run, so that its first window seemed to take as long as all of that."""
    events, cells, first = [], scoring.Scorer._cells, evaluation.Countdown
    monkeypatch.setattr(scoring.Scorer, "_cells", lambda *args: events.append("window") or cells(*args))
    monkeypatch.setattr(evaluation, "Countdown", lambda *args: events.append("from here") or first(*args))
    evaluate_runs([rope.folder, folder("alibi")], lengths=[16, 64], eval_tokens=64, out=tmp_path, say=str)
    assert [event for event, before in zip(events, [None, *events], strict=False) if event != before] == [
        "from here",
        "window",
        "from here",
        "window",
    ]


class TestRefusals:
    def test_learned_refuses_past_its_table_and_the_other_lengths_are_measured(self, folder, ask):
        run = open_run(folder("learned"))
        rows = ask(run, [8, 16, 32, 64])["rows"]
        assert [row["error"] is None for row in rows] == [True, True, False, False]
        assert "learned has 16 positions" in rows[2]["error"]
        assert rows[2]["perplexity"] is None
        assert ask(run, [8, 16])["rows"][0]["perplexity"] == pytest.approx(rows[0]["perplexity"], rel=0.05)

    def test_a_length_that_the_text_does_not_have(self, rope, text, ask):
        rows = ask(rope, [16, len(text)], eval_tokens=64)["rows"]
        assert rows[0]["error"] is None
        assert rows[1]["error"] == f"the text has {len(text)} tokens; a window needs {len(text) + 1}."
        assert "the longest document has" in ask(rope, [16, 5000], "last", eval_tokens=64)["rows"][1]["error"]
        half = ask(rope, [len(text) // 2 + 1], "sliding")["rows"]
        assert "as many for the context as to be scored" in half[0]["error"]
        long = ask(rope, [len(text) // 2], "positions")
        assert "the longest document" in long["rows"][0]["error"]
        assert long["bins"] == []

    def test_a_model_that_gives_no_number(self, folder, ask, tmp_path):
        run = open_run(folder("rope"))
        with torch.no_grad():
            run.model.transformer.ln_f.weight.fill_(float("nan"))
        result = ask(run, [16], eval_tokens=64)
        assert result["rows"][0]["error"].startswith("the loss is nan")
        assert json.loads((tmp_path / result["file"]).read_text())["rows"][0]["loss"] is None

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ({"lengths": []}, "at least one length"),
            ({"lengths": [16, 0]}, "lengths must be at least 2"),
            ({"lengths": [1]}, "lengths must be at least 2"),
            ({"protocol": "window"}, "Did you mean 'windows'"),
            ({"split": "training"}, "unknown split 'training'"),
            ({"eval_tokens": 0}, "eval_tokens must be at least 1"),
            ({"stride": 4}, "not for windows"),
            ({"protocol": "sliding", "stride": 17}, "would leave tokens out"),
            ({"protocol": "sliding", "stride": 0}, "stride must be"),
            ({"protocol": "positions", "stride": 17}, "a control of 16 tokens that moves by 17"),
            ({"protocol": "positions", "lengths": [16, 32]}, "takes one length"),
            ({"protocol": "last", "last": 20}, "cannot be scored at length 16"),
            ({"last": 20}, "not for windows"),
            ({"rope_scaling": "yarm"}, "Did you mean 'yarn'"),
            ({"rope_scaling": "yarn:much"}, "yarn:4"),
            ({"rope_scaling": "linear:-1"}, "factor must be a positive number"),
            ({"rope_scaling": "longrope"}, "longrope needs short_factor"),
            ({"data": "/nowhere/a.txt"}, "no file or folder"),
        ],
        ids=str,
    )
    def test_what_makes_no_sense(self, rope, ask, tmp_path, arguments, sentence):
        with pytest.raises((ValueError, OSError), match=sentence):
            ask(rope, **{"lengths": [16], **arguments})
        assert not list(tmp_path.iterdir())

    def test_a_scaling_of_what_is_not_rope(self, folder, ask):
        with pytest.raises(ValueError, match=r"for models with rope, and .* has alibi"):
            ask(open_run(folder("alibi", **APART)), [16], rope_scaling="yarn")


class TestScalings:
    @pytest.mark.parametrize(
        ("asked", "options"),
        [
            ("linear", {"scaling": "linear", "factor": 4.0}),
            ("linear:2", {"scaling": "linear", "factor": 2.0}),
            ("ntk", {"scaling": "ntk", "factor": 4.0}),
            ("dynamic", {"scaling": "dynamic", "factor": 1.0}),
            ("dynamic", {"scaling": "ntk", "factor": 4.0}),  # which at this length is the same
            ("yarn", {"scaling": "yarn", "factor": 4.0}),
            ("llama3", {"scaling": "llama3", "factor": 4.0}),
        ],
    )
    def test_are_the_model_opened_with_that_scaling(self, rope, ask, asked, options):
        row = ask(rope, [16, 64], eval_tokens=256, rope_scaling=asked)["rows"][1]
        run = open_run(rope.folder, {"name": "rope", "length": 16, **options})
        other, plain = (ask(model, [64], eval_tokens=256)["rows"][0] for model in (run, rope))
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert row["loss"] != pytest.approx(plain["loss"], rel=1e-6)

    def test_change_nothing_at_the_trained_length(self, rope, ask):
        scaled, plain = (ask(rope, [16], eval_tokens=256, rope_scaling=name)["rows"][0] for name in ("yarn", None))
        assert scaled["loss"] == pytest.approx(plain["loss"], rel=1e-6)


class TestBootstrap:
    def test_of_documents_of_one_size_has_the_deviation_of_a_mean(self):
        values = np.random.default_rng(0).normal(size=400)
        sums, counts = bootstrap(100 * values, np.full(400, 100), draws=4000)
        deviation = values.std() / 20  # of the mean of 400 drawn with replacement
        assert (sums / counts).std() == pytest.approx(deviation, rel=0.05)
        low, high = interval(sums / counts)
        assert (high - low) / 2 == pytest.approx(1.96 * deviation, rel=0.07)
        assert (high + low) / 2 == pytest.approx(values.mean(), abs=0.1 * deviation)

    def test_holds_the_truth_about_as_often_as_it_says(self):
        generator = np.random.default_rng(1)
        held = 0
        for trial in range(200):
            counts = generator.integers(50, 150, size=40)
            sums = counts * (3.0 + generator.normal(size=40))
            low, high = interval(np.divide(*bootstrap(sums, counts, seed=trial, draws=300)))
            held += low <= 3.0 <= high
        assert 0.87 <= held / 200 <= 0.99

    def test_draws_the_same_documents_for_all_sums_and_however_many_at_once(self, monkeypatch):
        values = np.arange(12.0).reshape(6, 2)
        one, two = bootstrap(values, 3 * values, seed=5)
        assert one.shape == (1000, 2)
        np.testing.assert_allclose(two, 3 * one)
        monkeypatch.setattr("relpos.evaluation.intervals.AT_ONCE", 100)
        np.testing.assert_array_equal(bootstrap(values, seed=5)[0], one)
        assert not np.array_equal(bootstrap(values, seed=6)[0], one)


class TestTheCommand:
    def test_prints_a_table_and_draws_a_curve_of_several_runs(self, folder, tmp_path):
        stem = "windows-lengths-16-64-eval-tokens-128"
        runs = [folder("rope"), folder("learned")]
        done = command(*runs, "--lengths", "16,64", "--eval-tokens", 128, "--out", tmp_path)
        assert done.exit_code == 0, done.output
        row = json.loads((tmp_path / "rope" / f"{stem}.json").read_text())["rows"][1]
        for words in (f"{row['perplexity']:.2f}", f"{row['bits_per_byte']:.4f}", "bits/byte"):
            assert words in done.stdout
        assert "learned, length 64: learned has 16 positions" in done.stdout
        picture = tmp_path / f"{stem}-rope-learned.png"
        assert done.stdout.splitlines()[-1] == str(picture)
        assert picture.read_bytes()[:4] == b"\x89PNG"

    def test_tries_scalings_beside_the_plain_model_and_prints_json(self, folder, tmp_path):
        question = ["--protocol", "last", "--last", 4, "--lengths", "16,32", "--eval-tokens", 16]
        done = command(folder("rope"), *question, "--rope-scaling", "yarn,linear:2", "--json", "--out", tmp_path)
        assert done.exit_code == 0, done.output
        assert [result["rope_scaling"] for result in json.loads(done.stdout)] == [None, "yarn", "linear:2"]
        assert {file.name for file in (tmp_path / "rope").glob("*.json")} == {
            f"last{scaling}-lengths-16-32-last-4-eval-tokens-16.json" for scaling in ("", "-yarn", "-linear-2")
        }

    def test_has_lengths_of_its_own_and_writes_beside_the_model(self, folder):
        run = open_run(folder("rope"))
        assert default_lengths(run) == [16, 32, 64, 128]  # the longest document has fewer than 256
        done = command(run.folder, "--protocol", "positions", "--eval-tokens", 256)
        assert done.exit_code == 0, done.output
        assert "91 – 127" in done.stdout
        file = run.folder / "evaluation" / "positions-eval-tokens-256.json"
        assert json.loads(file.read_text())["rows"][0]["length"] == 128
        assert file.with_suffix(".png").exists()

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["--lengths", "a,b"], "--lengths takes whole numbers"),
            (["--lengths", ","], "--lengths takes whole numbers"),
            (["--lengths", "32,64"], "nothing could be measured. learned, length 32: learned has 16 positions"),
        ],
    )
    def test_says_what_is_wrong_in_a_sentence(self, folder, tmp_path, arguments, sentence):
        done = command(folder("learned"), *arguments, "--out", tmp_path)
        assert isinstance(done.exception, ValueError)  # main prints it
        assert sentence in str(done.exception)

    @pytest.mark.parametrize("protocol", ["windows", "last", "positions"])
    def test_where_nothing_can_be_measured_says_why_and_draws_nothing(self, folder, tmp_path, protocol):
        done = command(folder("rope"), "--lengths", 90000, "--protocol", protocol, "--out", tmp_path)
        assert isinstance(done.exception, ValueError)  # main prints it, and ends with 2
        sentence = r"nothing could be measured\. rope, length 90000: the .* needs 90001\."
        assert re.fullmatch(sentence, str(done.exception))
        assert not list(tmp_path.rglob("*.png"))


class TestTheNamesOfFiles:
    def test_say_the_question_so_that_none_overwrites_another(self, folder, world, tmp_path):
        """Among them two corpora of one name."""
        run = tmp_path / "rope"
        shutil.copytree(folder("rope"), run, ignore=shutil.ignore_patterns("evaluation", "checkpoint-*"))
        for place, text in (("a", "some words "), ("b", "other words ")):
            (world / place).mkdir(exist_ok=True)
            (world / place / "test.txt").write_text(text * 200)
        questions = [
            [],
            ["--lengths", "16"],
            ["--protocol", "sliding"],
            ["--protocol", "sliding", "--stride", "8"],
            ["--seed", "1"],
            ["--split", "all"],
            ["--data", str(world / "a" / "test.txt")],
            ["--data", str(world / "b" / "test.txt")],
            ["--data", str(world / "b" / "test.txt"), "--split", "heldout", "--lengths", "16"],
            ["--rope-scaling", "yarn:4"],
        ]
        pictures, answers = [], {}
        for question in questions:
            done = command(run, "--eval-tokens", 128, *question)
            assert done.exit_code == 0, done.output
            pictures.append(done.stdout.splitlines()[-1])
            now = {file: json.loads(file.read_text())["rows"] for file in (run / "evaluation").glob("*.json")}
            assert all(now[file] == rows for file, rows in answers.items())
            answers = now
        assert len(set(pictures)) == len(questions)
        assert len(answers) == len(questions)  # the plain model beside a scaling is the first question again

    def test_of_the_plain_question_is_the_protocol(self, rope, ask):
        assert ask(rope, default_lengths(rope))["file"] == "windows.json"
        assert ask(rope, [128], "positions")["file"] == "positions.json"

    def test_are_short_enough_for_a_file_and_still_differ(self):
        one, other = (question_stem("windows", lengths=range(100, end)) for end in (200, 201))
        assert one != other
        assert len(one) == len(other) == 150
        assert question_stem("last", data="hub/na me", data_hash="0123456789") == "last-na-me-01234567"


@pytest.fixture(scope="module")
def wiki(world):
    """A test file as the field has them: one text."""
    chance = random.Random(3)
    text = "\n".join(" ".join(chance.choice(["kana", "lori", "mirdo"]) for _ in range(30)) for _ in range(60))
    (world / "wiki.test.txt").write_text(text)
    return str(world / "wiki.test.txt")


class TestSplits:
    def test_of_a_foreign_file_all_of_it_is_scored_by_default_with_intervals_over_blocks(self, rope, wiki, ask):
        result = ask(rope, [16, 64], data=wiki)
        ids = [*rope.tokenizer(Path(wiki).read_text())["input_ids"], rope.tokenizer.eos_token_id]
        tokens, row, block = Tokens(np.array(ids), np.array([0])), result["rows"][0], result["intervals"]["block"]
        assert (result["split"], result["corpus"]["tokens"]) == ("all", len(ids))
        assert row["tokens"] == (len(ids) - 1) // 64 * 64
        assert result["rows"][1]["loss"] == pytest.approx(mean(in_windows(rope, tokens, 64)), rel=1e-5)
        assert result["intervals"]["over"] == "blocks"
        assert (row["documents"], row["blocks"]) == (1, -(-len(ids) // block))
        assert block % 64 == 0
        assert row["low"] < row["perplexity"] < row["high"]
        assert any(f"over its blocks of {block:,} tokens" in sentence for sentence in result["warnings"])
        losses = in_windows(rope, tokens, 16)
        blocks = [[losses[place] for place in losses if place // block == number] for number in range(row["blocks"])]
        assert row["units"]["tokens"] == [len(losses) for losses in blocks]
        np.testing.assert_allclose(row["units"]["loss"], [sum(losses) for losses in blocks], rtol=1e-5)
        assert ask(rope, [16], data=wiki, split="heldout")["corpus"]["tokens"] < 0.2 * len(ids)

    def test_one_document_is_enough_and_few_are_warned_of(self, rope, world, ask):
        lines = [json.dumps({"text": f"{word} " * 120}) for word in ("kana", "lori")]
        one, two = world / "one.jsonl", world / "two.jsonl"
        one.write_text(lines[0])
        two.write_text("\n".join(lines))
        assert ask(rope, [16], data=str(one))["corpus"]["documents"] == 1
        with pytest.raises(ValueError, match="at least two are needed"):
            ask(rope, [16], data=str(one), split="heldout")
        result = ask(rope, [16], data=str(two))
        assert result["rows"][0]["low"] is not None
        assert "The 95 % intervals rest on 2 documents" in result["warnings"][0]
        single = ask(rope, [16], data=str(world / "text.txt"), split="heldout")  # too short for two blocks
        assert (single["rows"][0]["documents"], single["rows"][0]["low"]) == (1, None)
        assert single["corpus"]["name"] == str(world / "text.txt")

    def test_of_the_runs_own_corpus_the_held_out_part_is_scored_by_default(self, rope, corpus, text, world, ask):
        copied = world / "copied.jsonl"
        copied.write_text(Path(corpus).read_text())
        for data in (None, corpus, str(copied)):
            result = ask(rope, [16], data=data)
            assert (result["split"], result["corpus"]["tokens"]) == ("heldout", len(text))
            assert not any("was trained on" in sentence for sentence in result["warnings"])

    def test_all_of_the_training_corpus_warns(self, rope, folder, corpus, ask):
        warning = "The run was trained on most of this text"
        for data in (None, corpus):
            result = ask(rope, [16], data=data, split="all", eval_tokens=64)
            assert warning in result["warnings"][0]
        assert result["corpus"]["documents"] == 90
        assert warning in command(folder("rope"), "--split", "all", "--eval-tokens", 64).stdout

    @pytest.mark.parametrize(
        ("tokens", "longest", "block"), [(100_000, 512, 1024), (100_000, 8192, 8192), (99, 16, 256)]
    )
    def test_blocks_hold_a_window_of_the_longest_length_and_are_at_most_a_hundred(self, tokens, longest, block):
        units = units_of(Tokens(np.zeros(tokens, dtype=np.uint16), np.array([0])), longest)
        assert units.block == block
        assert len(units.starts) <= 100

    def test_of_very_many_documents_neighbours_are_kept_together(self):
        starts = np.arange(0, 50_000, 10)
        sums = unit_sums(Units(starts, None), np.arange(5000), np.full(5000, 2.0), np.full(5000, 10))
        assert sums["number"] == list(range(500))
        assert (set(sums["loss"]), set(sums["tokens"])) == ({20.0}, {100})


class TestBitsPerByte:
    TEXT = "Größe, 漢字 and 🙂🙂 — naïve\n" * 40

    @pytest.mark.parametrize("name", ["bpe-280", "gpt2"])
    def test_bytes_of_the_tokens_are_the_bytes_of_the_text(self, rope, name):
        """Also where a character is split: with 280 entries every foreign one is."""
        tokenizer = rope.tokenizer if name == "bpe-280" else gpt2_tokenizer()
        ids = tokenizer(self.TEXT)["input_ids"]
        assert any("�" in tokenizer.decode([token]) for token in ids)  # a part of a character
        assert token_bytes(tokenizer)[ids].sum() == len(self.TEXT.encode())
        assert token_bytes(tokenizer)[tokenizer.eos_token_id] == 0
        assert token_bytes(task_tokenizer(task("copy"))) is None  # not byte-level

    def test_are_the_bits_of_all_scored_tokens_by_their_bytes(self, rope, world, ask):
        (world / "foreign.txt").write_text(self.TEXT)
        row = ask(rope, [64], data=str(world / "foreign.txt"))["rows"][0]
        pieces = [rope.tokenizer.convert_ids_to_tokens(token) for token in rope.tokenizer(self.TEXT)["input_ids"]]
        scored = sum(len(piece) for piece in pieces[1 : row["tokens"] + 1])
        assert row["bytes"] == scored <= len(self.TEXT.encode())
        assert row["bits_per_byte"] == pytest.approx(row["loss"] * row["tokens"] / np.log(2) / scored)


@pytest.mark.slow
def test_gpt2_small_reads_16384_tokens_in_less_than_4_gb(tmp_path):
    """With 3 of its 12 layers: the others add their weights only, 28 MB each. And memory is linear in the length."""
    code = f"""
import json, random, torch
from pathlib import Path
from relpos.evaluation.evaluation import evaluate
from relpos.runs.run import Run
from relpos.text.tokenizers import gpt2_tokenizer
from relpos.models import RelposGPT2Config, RelposGPT2ForCausalLM
position = {{"name": "kerple_log"}}
config = RelposGPT2Config.preset("small", n_layer=3, vocab_size=50257, position=position)
model = RelposGPT2ForCausalLM(config).eval()
run = Run(Path({str(tmp_path)!r}), model, gpt2_tokenizer(), None, {{}}, {{}})
print(json.dumps([evaluate(run, [length], eval_tokens=1, say=str)["rows"][0] for length in (256, 4096, 16384)]))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    short, middle, long = (row["peak_memory_bytes"] for row in json.loads(done.stdout))
    assert long + 9 * 28.4e6 < 4e9
    assert long - short < 5 * (middle - short)
