"""Opening what was trained: a run's folder, a checkpoint of it, a GPT-2 of transformers."""

import json

import pytest
import torch
import transformers

from relpos.runs.run import open_run
from relpos.training.training import train

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture(scope="module")
def rope(world, settings):
    train(settings(world / "rope", model__encoding="rope"))
    return world / "rope"


def test_a_run_knows_how_it_was_trained(rope):
    run = open_run(rope)
    assert (run.encoding, run.trained_length, run.result["step"]) == ("rope", 16, 9)
    assert run.settings.data.source == run.about["corpus"]["name"]
    assert len(run.heldout()) == run.about["tokens"]["heldout"]
    assert not run.model.training


def test_a_checkpoint_is_a_run_at_an_earlier_step(rope):
    run = open_run(rope / "checkpoint-6")
    assert run.trained_length == 16
    last = open_run(rope)
    assert not torch.equal(run.model.lm_head.weight, last.model.lm_head.weight)


def test_another_encoding_may_be_put_in(rope):
    tokens = torch.arange(100)[None]
    one = open_run(rope).model(tokens).logits
    same = open_run(rope, {"name": "rope"}).model(tokens).logits
    other = open_run(rope, {"name": "rope", "scaling": "linear", "factor": 4.0}).model(tokens).logits
    torch.testing.assert_close(same, one, rtol=0, atol=0)
    assert (other - one).abs().max() > 1e-3


def test_a_gpt2_of_transformers_opens(tmp_path):
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=32, vocab_size=50257)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path)
    run = open_run(tmp_path)
    assert (run.encoding, run.trained_length, run.settings) == ("learned", 32, None)
    tokens = torch.tensor([run.tokenizer("Hello world")["input_ids"]])
    torch.testing.assert_close(run.model(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "no config.json"),
        ({"run.yaml": "run: {}"}, "rerun relpos train to finish it"),
        ({"config.json": "{"}, "is not valid JSON"),
        ({"config.json": json.dumps({"model_type": "mistral"})}, "there are no weights"),
    ],
)
def test_what_is_no_model_is_refused_with_a_sentence(tmp_path, files, sentence):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises((ValueError, OSError), match=sentence):
        open_run(tmp_path)
