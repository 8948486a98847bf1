"""Training on a text that is tokenized while it is read: the same weights as on one that was tokenized before."""

import json
import subprocess
import sys

import pytest
from interrupted_training import interrupted_after, same_weights

from relpos.evaluation.evaluation import evaluate
from relpos.runs.run import open_run
from relpos.system.files import cache_folder
from relpos.training.training import train

pytestmark = pytest.mark.heavy

TEXTS = [f"Message {number}: " + " ".join(f"word{number * k % 31}" for k in range(40)) for number in range(8)]


@pytest.fixture(scope="module")
def lines(world):
    file = world / "lines.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return file


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr("relpos.text.store.CHUNK", 300)


@pytest.fixture(scope="module")
def streamed(settings, lines):
    """Settings of a run that reads the text in order behind 200 held-out tokens, for more than an epoch."""

    def make(out, **more):
        division = {"data__source": str(lines), "data__tokenizer": "gpt2", "data__heldout": 200}
        division |= {"data__order": "sequential", "data__stream": True, "run__steps": 12, "run__eval_every": 60}
        return settings(out, **{**division, "run__save_every": 6, **more})

    return make


@pytest.fixture
def prepared(streamed, tmp_path, monkeypatch):
    """A run on the same text, tokenized as a whole before the first step, with a cache of its own."""
    monkeypatch.setenv("RELPOS_CACHE", str(tmp_path / "other-cache"))
    train(streamed(tmp_path / "prepared", data__stream=False))
    monkeypatch.setenv("RELPOS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "prepared"


@pytest.mark.slow
def test_a_streamed_run_has_the_weights_of_a_prepared_one_and_so_has_one_that_is_resumed(
    prepared, streamed, tmp_path, monkeypatch
):
    writers, popen = [], subprocess.Popen

    def started(*args, **options):
        writers.append(popen(*args, **options))
        return writers[-1]

    monkeypatch.setattr("relpos.text.prepare.subprocess.Popen", started)
    train(streamed(tmp_path / "streamed"))
    assert same_weights(prepared, tmp_path / "streamed")
    assert writers[0].args[:3] == [sys.executable, "-m", "relpos.text.prepare"]
    assert writers[0].poll() is not None  # it ended with the training
    with interrupted_after(8):
        train(streamed(tmp_path / "resumed"))
    for chunk in sorted(cache_folder().glob("tokens/*/[0-9]*"))[1::2]:  # damaged in the meantime
        (chunk / "text.ids").write_bytes((chunk / "text.ids").read_bytes()[:-4])
    train(streamed(tmp_path / "resumed"))
    assert same_weights(prepared, tmp_path / "resumed")
    scores = [
        evaluate(open_run(folder), [16, 64], out=tmp_path / folder.name, say=lambda text: None)["rows"]
        for folder in (prepared, tmp_path / "streamed")
    ]
    assert [row["perplexity"] for row in scores[0]] == [row["perplexity"] for row in scores[1]]
    assert scores[0][0]["tokens"] == 192  # of the 200 that are held out, in windows of 64


def test_training_starts_before_the_text_is_tokenized_and_notices_another_text(streamed, lines, tmp_path, monkeypatch):
    monkeypatch.setenv("RELPOS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("relpos.training.model_and_data.start_writer", lambda store: None)  # nobody writes ahead
    other = tmp_path / "lines.jsonl"
    other.write_bytes(lines.read_bytes())
    train(streamed(tmp_path / "run", data__source=str(other), run__steps=1))
    (folder,) = cache_folder().glob("tokens/*")
    assert len(list(folder.glob("[0-9]*"))) == 1  # 200 tokens and a step of four windows of 16
    settings, about = open_run(tmp_path / "run").settings, open_run(tmp_path / "run").about
    assert (settings.data.stream, about["tokens"]) == (True, {"heldout": 200})
    other.write_bytes(lines.read_bytes().replace(b"Message 3", b"Message 4"))
    with pytest.raises(ValueError, match=r"the text of .*lines.jsonl has changed since"):
        train(streamed(tmp_path / "run", data__source=str(other), run__steps=2))
