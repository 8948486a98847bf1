"""Damaged files of the cache and of an evaluation: named in a warning and computed again, with the same numbers."""

import json
import shutil

import numpy as np
import pytest
from task_scores import score_task

from relpos.evaluation.evaluation import evaluate
from relpos.runs.run import open_run
from relpos.system.seal import damage, signed, undamaged
from relpos.text.corpus import open_corpus
from relpos.text.tokenizers import load_tokenizer
from relpos.text.tokens import tokenize
from relpos.training.training import train

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("world")]


def halve(data):
    return data[: len(data) // 2]


def zero(data):
    return bytes(len(data))


def flip(data):
    """One bit of the last byte."""
    return data[:-1] + bytes([data[-1] ^ 1])


def empty(data):
    return b""


def other_json(data):
    return b"[1]"


HARM = [halve, zero, flip, empty, other_json]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of this test alone."""
    monkeypatch.setenv("RELPOS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def read(world):
    """The tokens of both portions of the text, as plain lists."""
    corpus = open_corpus(str(world / "text.txt"))
    tokens = tokenize(corpus, load_tokenizer("bpe-280", corpus))
    return {portion: (each.ids.tolist(), each.starts.tolist()) for portion, each in tokens.items()}


class TestADamagedCache:
    @pytest.mark.parametrize("harm", [*HARM, None])
    @pytest.mark.parametrize(
        "name",
        ["tokens/*/*/heldout.ids", "tokens/*/*/about.json", "tokens/*/*/sealed.json", "tokenizers/*/tokenizer.json"],
    )
    def test_is_named_and_written_again(self, cache, world, capsys, name, harm):
        before = read(world)
        (file,) = cache.glob(name)
        if harm is None:
            file.unlink()
        else:
            file.write_bytes(harm(file.read_bytes()))
        capsys.readouterr()
        assert read(world) == before
        warning = capsys.readouterr().err
        assert f"warning: {file.parent} is damaged and is written again: {file.name}" in warning
        assert damage(file.parent) is None
        assert read(world) == before
        assert "warning" not in capsys.readouterr().err
        assert [path.name for path in file.parent.parent.glob("[!.]*")] == [file.parent.name]
        assert not [path for path in file.parent.parent.glob(".*") if path.is_dir()]

    def test_that_is_a_file_is_written_again(self, cache, world):
        before = read(world)
        (folder,) = cache.glob("tokens/*")
        shutil.rmtree(folder)
        folder.write_text("not a folder")
        assert read(world) == before


@pytest.fixture(scope="module")
def run(world, settings):
    train(settings(world / "run"))
    return open_run(world / "run")


def perplexities(run, out):
    return [row["perplexity"] for row in evaluate(run, [16, 24], out=out, say=lambda text: None)["rows"]]


class TestAnEvaluation:
    def test_with_a_changed_digit_in_its_parts_has_the_same_perplexity(self, run, tmp_path, capsys):
        before = perplexities(run, tmp_path)
        files = sorted(tmp_path.glob("parts/*.jsonl"))
        for file in files:
            lines = file.read_text().splitlines()
            entry = json.loads(lines[0])
            entry["cells"][0][3] += 1.0
            file.write_text("\n".join([json.dumps(entry), *lines[1:]]) + "\n")
        assert perplexities(run, tmp_path) == before
        warnings = capsys.readouterr().err
        assert all(f"warning: line 1 is damaged in {file}" in warnings for file in files)
        assert perplexities(run, tmp_path) == before
        assert "warning" not in capsys.readouterr().err

    @pytest.mark.parametrize("harm", [halve, zero, flip, empty, other_json, lambda data: b"\xff\n" + data])
    def test_with_damaged_parts_has_the_same_perplexity(self, run, tmp_path, harm):
        before = perplexities(run, tmp_path)
        for file in tmp_path.glob("parts/*.jsonl"):
            file.write_bytes(harm(file.read_bytes()))
        assert perplexities(run, tmp_path) == before

    def test_whose_last_line_was_cut_off_by_a_kill_is_not_called_damaged(self, run, tmp_path, capsys):
        before = perplexities(run, tmp_path)
        for file in tmp_path.glob("parts/*.jsonl"):
            file.write_bytes(file.read_bytes()[:-9])
        assert perplexities(run, tmp_path) == before
        assert "damaged" not in capsys.readouterr().err


def test_a_changed_score_of_a_task_is_computed_again(settings, tmp_path, capsys):
    from relpos.runs.settings import load_settings

    train(load_settings(None, {"data.task": "copy", "run.steps": 1, "run.batch_size": 2, "run.out": str(tmp_path)}))
    run = open_run(tmp_path)
    before = score_task(run, "copy", [32], samples=4, say=lambda text: None)["rows"]
    file = tmp_path / "evaluation" / "task-copy.json"
    tree = json.loads(file.read_text())
    tree["results"][0]["rows"][0]["accuracy"] = 1.0
    file.write_text(json.dumps(tree))
    assert score_task(run, "copy", [32], samples=4, say=lambda text: None)["rows"] == before
    assert f"warning: {file} is damaged" in capsys.readouterr().err


def test_an_entry_survives_json_and_nothing_else():
    entry = {"batch": 1, "seconds": 0.1, "cells": [[1, 0, 3, 1e-17]], "places": (1, 2), 3: None}
    kept = json.loads(json.dumps(signed(entry)))
    assert undamaged(kept) == json.loads(json.dumps(entry))
    assert undamaged({**kept, "seconds": np.nextafter(0.1, 1)}) is None
    assert undamaged(kept | {"more": 1}) is None
    assert undamaged([kept]) is None
