"""relpos ls MODEL: what a configuration says of a model, in words and as JSON."""

import json

import pytest
from small_models import GROUPED, SIZES, TOKENS, WINDOW
from transformers import CONFIG_MAPPING
from typer.testing import CliRunner

from relpos.cli import app


@pytest.fixture
def folder(tmp_path):
    def save(kind, **settings):
        CONFIG_MAPPING[kind](**settings).save_pretrained(tmp_path)
        return str(tmp_path)

    return save


def test_ls_prints_a_model_in_words(folder):
    name = folder("gemma2", **GROUPED, sliding_window=WINDOW)
    printed = " ".join(CliRunner().invoke(app, ["ls", name]).stdout.split())
    assert "(model type gemma2)" in printed
    assert "heads 4, head_dim 8, 2 key heads length 64 tokens" in printed
    assert "layer 1: RoPE, theta 10,000, all 8 dimensions, half layout; window 8; softcap 50" in printed
    assert "relpos.use yes (checked by one small forward) relpos.transplant no" in printed


def test_ls_prints_json(folder):
    known = json.loads(CliRunner().invoke(app, ["ls", folder("deberta", **SIZES, talking_head=True), "--json"]).stdout)
    assert (known["layers"], known["heads"], known["trained_length"]) == (2, 4, 64)
    assert known["positions"] == ["layers 1–2: learned positions, 64 × 32, added to the embedding"]
    assert not known["use"]
    assert "talking heads mix the scores" in known["use_reason"]


def test_ls_prints_our_own_models(folder):
    position = {"name": "rope", "plan": [{"every": 2, "name": "nope"}]}
    name = folder("relpos_llama", **GROUPED, position=position)
    known = json.loads(CliRunner().invoke(app, ["ls", name, "--json"]).stdout)
    assert known["positions"] == ["layer 1: relpos rope", "layer 2: relpos nope"]
    assert known["use"]
    assert known["transplant"]


def test_the_length_of_a_table_does_not_count_unused_rows(folder):
    name = folder("roberta", **{**TOKENS, **SIZES, "pad_token_id": 1, "max_position_embeddings": 66})
    assert json.loads(CliRunner().invoke(app, ["ls", name, "--json"]).stdout)["trained_length"] == 64


def test_an_encoding_s_name_wins_over_a_folder(tmp_path, monkeypatch):
    (tmp_path / "alibi").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "ALiBi: a linear penalty" in CliRunner().invoke(app, ["ls", "alibi"]).stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ls", "kerpel_log"], "Did you mean 'kerple_log'?"),
        (["ls", "."], "it has no config.json"),
        (["ls", "nowhere/model.gguf"], "there is no file nowhere/model.gguf"),
        (["ls", ".", "--markdown"], "--markdown is for encodings"),
    ],
)
def test_ls_refuses_with_a_sentence(arguments, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sentence in str(CliRunner().invoke(app, arguments).exception)
