"""Training, evaluating, drawing and comparing with every family, through the same calls."""

import json
import math

import numpy as np
import pytest
import torch
import yaml
from interrupted_training import interrupted_after, same_weights
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from relpos.encodings import Rope
from relpos.evaluation.evaluation import check_scaling, evaluate, scaled_run
from relpos.models import FAMILIES
from relpos.pictures.draw import draw
from relpos.runs.run import open_run
from relpos.text.tokens import MaskedWindows, masked_places, separator_of
from relpos.training.training import train

pytestmark = pytest.mark.heavy

PLAN = [
    {"every": 2, "name": "nope"},
    {"layers": [1], "window": 8},
    {"layers": [3], "name": "rope", "base": 500000.0},
]


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

    def test_is_drawn_and_has_a_model_card_that_opens_it(self, runs, family):
        for show in ("bias", "scores"):
            picture = draw(runs[family], show=show, length=24)
            assert FAMILIES[family].title in picture.caption
            seen = np.isfinite(picture.maps[0].mean[0][np.triu_indices(24, k=1)])
            assert seen.all() == seen.any() == (not FAMILIES[family].causal)
        card = (runs[family].folder / "README.md").read_text()
        assert f"{FAMILIES[family].auto_class}.from_pretrained" in card
        assert FAMILIES[family].title in card


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])  # of which is the rest
def test_an_interrupted_run_ends_with_the_same_weights(runs, settings, family, tmp_path):
    with interrupted_after(7):
        train(settings(tmp_path, model__family=family, model__dropout=0.0), quiet)
    train(settings(tmp_path, model__family=family, model__dropout=0.0), quiet)
    assert same_weights(tmp_path, runs[family].folder)


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
        ({"data__mask_share": 1.0}, "data.mask_share must be above 0 and below 1"),
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


@pytest.fixture(scope="module")
def planned(settings, tmp_path_factory):
    """A run whose layers are: rope in a window, nope, rope with another base, nope."""
    folder = tmp_path_factory.mktemp("plan")
    train(settings(folder, model__encoding="rope", model__plan=PLAN, run__steps=2), quiet)
    return open_run(folder)


class TestAPlan:
    def test_is_trained_saved_and_opened(self, planned):
        position = json.loads((planned.folder / "config.json").read_text())["position"]
        assert position["plan"] == [*PLAN[:2], {**PLAN[2], "length": 16}]  # the trained length
        assert "length" not in PLAN[2]  # the settings of the caller stay as they are
        names = [type(layer.position).__name__ for layer in planned.family.layers(planned.model)]
        assert names == ["SumEncoding", "Nope", "Rope", "Nope"]
        assert '{"layers": [1], "window": 8}' in (planned.folder / "README.md").read_text()

    @pytest.mark.parametrize(
        ("layer", "name"),
        [(1, "rope in a window of 8"), (2, "nope"), (3, "rope"), ("all", "rope in a window of 8 / nope / rope")],
    )
    @pytest.mark.parametrize("show", [None, "profile"])
    def test_is_drawn_with_the_encoding_of_the_layer(self, planned, layer, name, show):
        picture = draw(planned, layer=layer, show=show, length=16)
        assert picture.caption.startswith(f"{name}, GPT-2 nano, ")
        assert all(drawn.show == "scores" for drawn in picture.maps)

    def test_shows_no_value_beyond_a_window_and_no_bias_where_a_layer_adds_none(self, planned):
        seen = np.isfinite(draw(planned, layer=1, show="profile", length=16).maps[0].profile)
        assert (seen == (np.arange(16) < 8)).all()
        with pytest.raises(ValueError, match=r"layer 2 of \S+ adds no bias: show the scores or the weights"):
            draw(planned, layer="all", show="bias", length=16)

    def test_is_scaled_in_every_layer_with_rope(self, planned):
        scaled = scaled_run(planned, "linear:4", 32)
        check_scaling(planned, "linear:4")
        plain, stretched = ([layer.position for layer in run.family.layers(run.model)] for run in (planned, scaled))
        for layer in (0, 2):
            before, after = (
                next(part for part in positions[layer].modules() if isinstance(part, Rope)).rope.frequencies(
                    torch.tensor([[32]]), torch.float64
                )
                for positions in (plain, stretched)
            )
            torch.testing.assert_close(after, before / 4)
        assert evaluate(planned, [32], rope_scaling="yarn", say=quiet)["rows"][0]["error"] is None


def test_the_tokenizer_of_a_published_bert_ends_documents_with_its_separator(world, tmp_path):
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "[SEP]": 1, "[MASK]": 2, "and": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", sep_token="[SEP]", mask_token="[MASK]"
    )
    config = BertConfig(vocab_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    run, text = open_run(tmp_path), str(world / "text.txt")
    assert run.heldout(text).ids[-1] == 1
    assert evaluate(run, [8], data=text, say=quiet)["rows"][0]["error"] is None
    tokenizer.sep_token = None
    with pytest.raises(ValueError, match="no token that ends a document: set its eos_token or sep_token"):
        separator_of(tokenizer)
