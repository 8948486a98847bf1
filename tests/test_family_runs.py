"""Training, evaluating, drawing and comparing with every family, through the same calls."""

import json
import math

import numpy as np
import pytest
import torch
import yaml

from relpos.lab.data.masking import MaskedWindows, masked_places
from relpos.lab.evaluate.evaluation import evaluate
from relpos.lab.runs.run import open_run
from relpos.lab.train.training import train
from relpos.models import FAMILIES
from relpos.view import draw


def quiet(text):
    """Say nothing."""


@pytest.fixture(scope="module")
def runs(settings, tmp_path_factory):
    """One trained model per family."""
    folder = tmp_path_factory.mktemp("runs")
    for family in FAMILIES:
        train(settings(folder / family, model__family=family, model__dropout=0.0), quiet)
    return {family: open_run(folder / family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
class TestARun:
    def test_is_of_its_family_and_learns(self, runs, family):
        run = runs[family]
        assert run.family.name == family
        assert yaml.safe_load((run.folder / "run.yaml").read_text())["model"]["family"] == family
        assert run.result["heldout"] < run.result["heldout_at_start"] - 0.1

    def test_that_was_interrupted_ends_with_the_same_weights(self, settings, family, tmp_path):
        for out in (tmp_path / "a", tmp_path / "b"):
            own = settings(
                out, model__family=family, model__dropout=0.0, optimizer__final_lr_ratio=1.0, optimizer__warmup_steps=0
            )
            if out.name == "a":
                own.run.steps = 4
                train(own, quiet)
                own.run.steps = 9
            train(own, quiet)
        assert open_run(tmp_path / "a").checksum == open_run(tmp_path / "b").checksum

    def test_is_drawn(self, runs, family):
        for show in ("bias", "scores"):
            picture = draw(runs[family], show=show, length=24)
            assert FAMILIES[family].title in picture.caption
            above = np.triu_indices(24, k=1)
            seen = np.isfinite(picture.maps[0].mean[0][above])
            assert seen.all() == (not FAMILIES[family].causal)
            assert seen.any() == (not FAMILIES[family].causal)

    def test_has_a_model_card_that_opens_it(self, runs, family):
        card = (runs[family].folder / "README.md").read_text()
        assert f"{FAMILIES[family].auto_class}.from_pretrained" in card
        assert FAMILIES[family].title in card


@pytest.mark.parametrize("length", [16, 40])
def test_pseudo_perplexity_is_that_of_a_direct_loop(runs, length, tmp_path):
    run = runs["bert"]
    row = evaluate(run, [length], out=tmp_path, say=quiet)["rows"][0]
    text = run.heldout()
    ids = torch.from_numpy(text.ids.astype(np.int64))
    losses = []
    for start in range(0, len(ids) - length, length):
        places = np.arange(start + 1, start + length + 1)
        hidden = torch.from_numpy(masked_places(places))
        window = ids[places]
        read = torch.where(hidden, run.tokenizer.mask_token_id, window)
        with torch.no_grad():
            logits = run.model(read[None]).logits[0].double()
        losses += torch.nn.functional.cross_entropy(logits, window, reduction="none")[hidden].tolist()
    result = json.loads((tmp_path / f"windows-lengths-{length}.json").read_text())
    assert result["metric"] == "pseudo-perplexity"
    assert "one token in 7 is masked" in result["warnings"][0]
    assert row["tokens"] == len(losses)
    assert row["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert row["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)


def test_what_a_masked_model_cannot_do_is_refused_with_a_sentence(settings, tmp_path):
    for overrides, sentence in (
        ({"model__encoding": "cope"}, "cope is defined for causal attention only, and BERT attends in both directions"),
        ({"data__masking": "words"}, "unknown masking 'words'. Did you mean 'word'?"),
        ({"data__mask_share": 1.0}, "data.mask_share must be between 0 and 1"),
    ):
        with pytest.raises(ValueError, match="(?s)" + sentence.replace("?", r"\?").replace(".", r"\.")):
            train(settings(tmp_path, model__family="bert", **overrides), quiet)
    with pytest.raises(ValueError, match="GPT-2 predicts the next token"):
        settings(tmp_path, data__masking="token")


def test_every_epoch_has_its_own_masks(settings, tmp_path, monkeypatch):
    """The text has eight batches: the ninth step begins the second epoch."""
    epochs = []
    monkeypatch.setattr(MaskedWindows, "set_epoch", lambda self, epoch: epochs.append(epoch))
    train(settings(tmp_path, model__family="bert", model__dropout=0.0), quiet)
    assert sorted(set(epochs)) == [0, 1]


def test_a_plan_is_trained_saved_and_opened(settings, tmp_path):
    plan = [{"every": 2, "name": "nope"}, {"layers": [1], "window": 8}]
    train(settings(tmp_path, model__encoding="rope", model__plan=plan, run__steps=2), quiet)
    run = open_run(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["position"]["plan"] == plan
    names = [type(layer.position).__name__ for layer in run.family.layers(run.model)]
    assert names == ["Together", "Nope", "Rope", "Nope"]
