"""Each window of a model that others trained begins as the model was trained: with BOS, or between CLS and SEP."""

import shutil

import pytest
import torch
from small_models import saved, small_model, word_tokenizer, write_words
from tokenizers.processors import TemplateProcessing
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM
from typer.testing import CliRunner

import relpos
from relpos.cli import app
from relpos.explorer.explore import open_subjects
from relpos.pretrained.framing import Framing, SpecialToken
from relpos.text.tokens import masked_places

BOS, COPIED, OTHER = 1, 5, 6  # ids in the vocabulary of `word_tokenizer`
BEGINS = "Each window begins with w01."
WORDS = "w05 w06 w05 w06"


@torch.no_grad()
def needs_bos() -> MistralForCausalLM:
    """A model of one layer whose attention looks for BOS, and which knows the text only if it finds it.

    Dimension 0 of the embedding marks BOS. All queries are equal, and the key of BOS alone is large, so that all of the
    attention goes to BOS where there is one: a sink. Its value makes the two words of the text likely; without it all
    64 words are equally likely.
    """
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}
    sizes |= {"num_key_value_heads": 1, "max_position_embeddings": 64, "vocab_size": 64, "sliding_window": None}
    tokens = {"bos_token_id": BOS, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}
    model = MistralForCausalLM(MistralConfig(rope_theta=1e12, **sizes, **tokens)).eval()
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    embedding, layer = model.model.embed_tokens.weight, model.model.layers[0].self_attn
    embedding[:, 1] = 1.0
    embedding[BOS] = torch.eye(8)[0]
    # Dimension 3 of q and k is rotated by almost nothing (theta 1e12), so that BOS is found from everywhere.
    layer.q_proj.weight[3, :2] = 10.0
    layer.k_proj.weight[3, 0] = 10.0
    layer.v_proj.weight[2, 0] = 1.0
    layer.o_proj.weight[2, 2] = 100.0
    model.lm_head.weight[[COPIED, OTHER], 2] = 5.0
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("framing")
    (home / "text.txt").write_text(" ".join(f"w{OTHER if place % 3 else COPIED:02}" for place in range(129)))
    return saved(needs_bos(), home / "model")


@torch.no_grad()
def test_the_model_of_these_tests_depends_on_bos():
    with_bos, without = (needs_bos()(torch.tensor([ids])).logits[0, -1].softmax(-1) for ids in ([BOS, 5, 6], [5, 6]))
    assert [float(with_bos[word]) for word in (COPIED, OTHER)] == pytest.approx([0.5, 0.5], abs=1e-3)
    assert float(without[COPIED]) == pytest.approx(1 / 64, abs=1e-5)


def test_the_perplexity_is_that_of_a_model_that_reads_bos_unless_it_is_left_out(folder, tmp_path):
    options = {"lengths": [16, 32], "data": folder.parent / "text.txt", "out": tmp_path, "say": lambda line: None}
    framed, plain = (relpos.evaluate(folder, **options, bos=bos) for bos in (True, False))
    for evaluation, perplexity, before in ((framed, 2.0, ["w01"]), (plain, 64.0, [])):  # of two words, of all words
        result = evaluation.results["model"]
        assert [row["perplexity"] for row in result["rows"]] == pytest.approx([perplexity] * 2, rel=1e-3)
        assert [row["tokens"] for row in result["rows"]] == [128, 128]
        assert result["special_tokens"] == {"before": before, "after": []}
    assert BEGINS in framed.results["model"]["warnings"][0]
    assert framed.files != plain.files  # neither overwrites the other


def test_the_command_line_says_what_each_window_begins_with(folder, tmp_path):
    arguments = ["evaluate", str(folder), "--lengths", "16", "--data", str(folder.parent / "text.txt")]
    arguments += ["--out", str(tmp_path)]
    framed, plain = (
        " ".join(CliRunner().invoke(app, [*arguments, *more]).stdout.split()) for more in ([], ["--no-bos"])
    )
    assert " 2.00 " in framed
    assert f"{BEGINS} Special tokens count in the length, and are not scored" in framed
    assert " 64.00 " in plain
    assert "w01" not in plain


def test_the_weights_that_are_drawn_show_the_sink(folder):
    picture = relpos.draw(folder, text=WORDS, show="weights", layer=1, label_tokens=True)
    assert picture.maps[0].mean.shape == (1, 5, 5)
    assert picture.maps[0].mean[0, :, 0] == pytest.approx([1.0] * 5, abs=1e-3)
    assert BEGINS in picture.caption
    assert picture.numbers["input"]["special_tokens"] == {"before": ["w01"], "after": []}
    assert "w01" in [label.get_text() for axes in picture.figure.axes for label in axes.get_xticklabels()]
    plain = relpos.draw(folder, text=WORDS, show="weights", layer=1, bos=False)
    assert plain.maps[0].mean[0, :, 0] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4], abs=1e-3)
    assert "begins with" not in plain.caption


def test_a_length_counts_bos(folder):
    assert relpos.draw(folder, text=WORDS, length=3, show="weights", layer=1).maps[0].length == 3
    with pytest.raises(ValueError, match="a window of 1 tokens has no room for text beside w01"):
        relpos.draw(folder, text=WORDS, length=1, show="weights", layer=1)


@pytest.mark.parametrize(("bos", "first"), [(True, "w01"), (False, "w05")])
def test_the_document_of_the_explorer_begins_with_bos(folder, bos, first):
    subject = open_subjects([str(folder)], length=8, text=WORDS, bos=bos)[0]
    scene = subject.scene(subject.complete({}))
    assert scene.view.tokens[0] == first
    assert (BEGINS in scene.notes) == bos


def encoder_folder(folder):
    """A RoBERTa whose tokenizer puts w01 and w02 around a text."""
    tokenizer = word_tokenizer()
    special = [("w01", 1), ("w02", 2)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="w01 $A w02", special_tokens=special)
    saved(small_model("roberta"), folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def test_an_encoder_reads_between_cls_and_sep(tmp_path):
    folder = encoder_folder(tmp_path / "model")
    targets = torch.tensor(write_words(tmp_path / "text.txt", 129))[1:].view(4, 32)
    options = {"lengths": [32], "data": tmp_path / "text.txt", "out": tmp_path / "out", "say": lambda line: None}
    result = relpos.evaluate(folder, **options).results["model"]
    masked = torch.from_numpy(masked_places(torch.arange(1, 129).numpy())).view(4, 32)
    read = targets.masked_fill(masked, 4)
    read[:, 0], read[:, -1] = 1, 2
    masked[:, [0, -1]] = False  # their places are those of CLS and SEP
    expected = F.cross_entropy(small_model("roberta")(read).logits[masked], targets[masked])
    assert result["rows"][0]["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert result["rows"][0]["tokens"] == int(masked.sum())
    assert "Each window begins with w01 and ends with w02." in result["warnings"][0]


def test_an_explicit_false_of_the_tokenizer_wins(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer_config.json"
    file.write_text(file.read_text().replace("{", '{"add_bos_token": false,', 1))
    assert len(relpos.open(tmp_path / "model").framing) == 0
    assert relpos.open(folder).framing == Framing((SpecialToken(BOS, "w01"),))


def test_a_causal_model_gets_no_token_of_the_end(tmp_path):
    framing = relpos.open(encoder_folder(tmp_path / "roberta")).framing
    assert [len(framing.before), len(framing.after)] == [1, 1]
    saved(needs_bos(), tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "roberta" / name, tmp_path / "model" / name)
    assert relpos.open(tmp_path / "model").framing == Framing((SpecialToken(1, "w01"),))


def test_a_model_of_a_family_of_ours_that_others_trained_begins_with_bos(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=64, n_positions=32, bos_token_id=BOS))
    assert relpos.open(saved(model, tmp_path / "theirs")).framing.before == (SpecialToken(BOS, "w01"),)
    ours = relpos.transplant(model, "alibi")
    assert len(relpos.open(saved(ours, tmp_path / "ours")).framing) == 0  # a model of relpos reads what it was given
