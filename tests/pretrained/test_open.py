"""Models that other people trained: opened, scored and drawn as their own code computes them."""

import json
import pickle
import re
import shutil
import warnings
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import kind_of, small_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    MPNetConfig,
    MPNetForMaskedLM,
    MPNetModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    RoFormerConfig,
    RoFormerForMaskedLM,
    ViTConfig,
    ViTModel,
)
from typer.testing import CliRunner

import relpos
from relpos.cli import app
from relpos.evaluation.evaluation import evaluate
from relpos.pretrained import open as model_opening
from relpos.text.tokens import masked_places

TEXT = "w05 w09 w12 w07 w30 w31 w09 w09 w08 w40 w50 w51 w52 w53 w05 w06 w07"
BOS = 1  # of all small models
OWN_CODE = ["mistral", "gemma2", "gpt_oss", "cohere2", "bloom", "mpt", "opt", "roberta", "modernbert", "mpnet"]
OWN_CODE += ["deberta", "deberta-v2"]


def word_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({f"w{i:02}": i for i in range(64)}, unk_token="w03"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "w00", "bos_token": "w01", "eos_token": "w02", "mask_token": "w04"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def mistral(tmp_path) -> Path:
    return saved(small_model("mistral"), tmp_path / "mistral")


@pytest.mark.parametrize("family", OWN_CODE)
def test_the_weights_that_are_drawn_are_those_of_the_models_own_code(family, tmp_path):
    model = small_model(family).eval()
    run = relpos.open(saved(model, tmp_path))
    assert type(run.model) is type(model)
    picture = relpos.draw(run, text=TEXT, layer=2, show="weights")
    model.set_attn_implementation("eager")
    before = [] if kind_of(family) == "encoder" else [BOS]
    ids = torch.tensor([[*before, *word_tokenizer()(TEXT)["input_ids"]]])
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions[1][0]
    drawn = torch.from_numpy(picture.maps[0].mean).nan_to_num()
    torch.testing.assert_close(drawn.float(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", OWN_CODE)
def test_the_perplexity_is_that_of_the_models_own_logits(family, tmp_path):
    model = small_model(family).eval()
    text = tmp_path / "text.txt"
    words = torch.randint(5, 64, (129,), generator=torch.Generator().manual_seed(1)).tolist()
    text.write_text(" ".join(f"w{word:02}" for word in words))
    run = relpos.open(saved(model, tmp_path / "model"))
    result = evaluate(run, [32], data=str(text), out=tmp_path / "out", say=lambda line: None)
    ids = torch.tensor(words)[:128].view(4, 32)
    targets = torch.tensor(words)[1:129].view(4, 32)
    model.set_attn_implementation("eager")
    if kind_of(family) == "encoder":
        masked = torch.from_numpy(masked_places(np.arange(1, 129))).view(4, 32)
        read = targets.masked_fill(masked, 4)
        targets = targets.masked_fill(~masked, -100)
    else:
        read = ids.clone()
        read[:, 0] = BOS  # in the place of a token that is read and not scored
    with torch.no_grad():
        expected = F.cross_entropy(model(read).logits.flatten(0, 1), targets.flatten())
    assert result["rows"][0]["error"] is None
    assert result["rows"][0]["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_a_t5_shows_its_bias(tmp_path):
    model = small_model("t5").eval()
    run = relpos.open(saved(model, tmp_path))
    picture = relpos.draw(run, text=TEXT, layer=1, show="bias")
    attention = model.encoder.block[0].layer[0].SelfAttention
    expected = attention.compute_bias(17, 17)[0].detach()
    torch.testing.assert_close(torch.from_numpy(picture.maps[0].mean).float(), expected, atol=1e-5, rtol=0)


def test_a_family_that_use_refuses_shows_its_attention_weights(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = RoFormerForMaskedLM(RoFormerConfig(vocab_size=64, **sizes)).eval()
    run = relpos.open(saved(model, tmp_path))
    assert "roformer" in run.family.refusal
    picture = relpos.draw(run, text=TEXT, layer=1, show="weights")
    with torch.no_grad():
        expected = model(torch.tensor([word_tokenizer()(TEXT)["input_ids"]]), output_attentions=True).attentions[0][0]
    torch.testing.assert_close(torch.from_numpy(picture.maps[0].mean).float(), expected, atol=1e-5, rtol=0)


def test_a_model_without_a_head_is_drawn_but_not_scored(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    run = relpos.open(saved(BertModel(BertConfig(vocab_size=64, **sizes)), tmp_path))
    assert relpos.draw(run, text=TEXT).maps[0].heads == 4
    with pytest.raises(ValueError, match="BertModel predicts no tokens, so it has no perplexity"):
        evaluate(run, [8], say=lambda line: None)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}


@pytest.mark.parametrize("pooler", [True, False])
def test_a_model_whose_file_lacks_its_head_opens_without_it(tmp_path, pooler):
    torch.manual_seed(0)
    model = MPNetModel(MPNetConfig(**SMALL), add_pooling_layer=pooler).eval()
    folder = saved(model, tmp_path)
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**entries, "architectures": ["MPNetForMaskedLM"]}))
    with pytest.warns(UserWarning, match=r"lacks lm_head.* MPNetModel is opened, which has no head and predicts no"):
        run = relpos.open(folder)
    assert type(run.model) is MPNetModel
    ids = torch.arange(5, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(run.model(ids)[0], model(ids)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "bert", "mistral"])
def test_so_does_one_of_our_families(tmp_path, family):
    model = small_model(family, tie_word_embeddings=False)
    folder = saved(model, tmp_path)
    file, prefix = folder / "model.safetensors", f"{model.base_model_prefix}."
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}, file, {"format": "pt"})
    with pytest.warns(UserWarning, match="which has no head and predicts no tokens"):
        run = relpos.open(folder)
    assert type(run.model) is type(model.base_model)
    first = next(name for name in tensors if name.startswith(prefix))
    save_file({name: t for name, t in tensors.items() if name.startswith(prefix) and name != first}, file)
    with pytest.raises(ValueError, match="do not fit its model"):
        relpos.open(folder)


@pytest.mark.parametrize(
    ("config", "model_class"), [(RobertaConfig, RobertaForMaskedLM), (MPNetConfig, MPNetForMaskedLM)]
)
def test_rows_for_padding_are_no_positions(tmp_path, config, model_class):
    torch.manual_seed(0)
    folder = saved(model_class(config(**SMALL, max_position_embeddings=34, pad_token_id=1)), tmp_path)
    run = relpos.open(folder)
    known = json.loads(CliRunner().invoke(app, ["ls", str(folder), "--json"]).stdout)
    assert run.trained_length == known["trained_length"] == 32
    assert relpos.draw(run, text="w05 " * 40, length=32, show="weights").maps[0].length == 32
    for length in (33, 34):
        with pytest.raises(ValueError, match=f"has a table of 32 positions, and the input has {length} tokens"):
            relpos.draw(run, text="w05 " * 40, length=length, show="weights")
    (tmp_path / "text.txt").write_text("w05 " * 99)
    options = {"data": str(tmp_path / "text.txt"), "out": tmp_path / "out", "say": lambda line: None}
    rows = evaluate(run, [32, 34], **options)["rows"]
    assert rows[0]["error"] is None
    assert "a table of 32 positions" in rows[1]["error"]


def test_a_model_that_reads_no_text_says_so(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    ViTModel(ViTConfig(image_size=32, patch_size=8, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="ViTModel reads pixel_values, not text"):
        relpos.draw(relpos.open(tmp_path), length=4)


def test_a_scaled_rope_is_that_of_transformers(tmp_path):
    model = small_model("qwen3", use_sliding_window=False, layer_types=None).eval()
    folder = saved(model, tmp_path)
    scaling = {"rope_type": "linear", "factor": 4.0}
    run = relpos.open(folder, {"name": "rope", "rope_parameters": scaling})
    config = model.config
    config.rope_parameters = {**config.rope_parameters, **scaling}
    expected = type(model).from_pretrained(folder, config=config).eval()
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        torch.testing.assert_close(run.model(ids).logits, expected(ids).logits, atol=1e-4, rtol=1e-4)


def test_a_scaling_is_evaluated_on_a_published_model(tmp_path):
    model = small_model("qwen3", use_sliding_window=False, layer_types=None, max_position_embeddings=16).eval()
    folder = saved(model, tmp_path / "model")
    words = torch.randint(5, 64, (65,), generator=torch.Generator().manual_seed(1)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(f"w{word:02}" for word in words))
    options = {"data": str(tmp_path / "text.txt"), "out": tmp_path / "out", "say": lambda line: None}
    result = evaluate(relpos.open(folder), [64], rope_scaling="linear", **options)
    config = model.config
    config.rope_parameters = {**config.rope_parameters, "rope_type": "linear", "factor": 4.0}  # 64 / 16
    scaled = type(model).from_pretrained(folder, config=config, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = F.cross_entropy(scaled(torch.tensor([[BOS, *words[1:64]]])).logits[0], torch.tensor(words[1:]))
    assert result["rows"][0]["loss"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(("family", "reason"), [("gemma3_text", "differ by layer"), ("opt", "has learned")])
def test_a_scaling_that_does_not_fit_a_published_model_is_refused(tmp_path, family, reason):
    run = relpos.open(saved(small_model(family), tmp_path))
    with pytest.raises(ValueError, match=reason):
        evaluate(run, [8], rope_scaling="yarn", say=lambda line: None)


def hub_model(tmp_path, monkeypatch, name) -> Path:
    """The folder of a model in a cache of the hub, which cannot be reached."""
    revision = "0" * 40
    home = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(revision)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return home / "snapshots" / revision


def test_a_name_on_the_hub_is_found_in_its_cache(tmp_path, monkeypatch):
    folder = saved(small_model("mistral"), hub_model(tmp_path, monkeypatch, "someone/small"))
    run = relpos.open("someone/small")
    assert (run.folder, run.encoding) == (Path("someone/small"), relpos.open(folder).encoding)
    assert run.evaluation == Path("evaluation/small")
    with pytest.raises(FileNotFoundError, match=r"no folder someone/other, and .* neither in the hub's cache nor"):
        relpos.open("someone/other")


def test_the_bias_of_a_model_on_the_hub_needs_only_its_tables(tmp_path, monkeypatch):
    model = small_model("t5").eval()
    folder = saved(model, hub_model(tmp_path, monkeypatch, "someone/t5"))
    opened = []

    def opener(name):
        def open_file(file):
            if not (folder / file).exists():
                raise FileNotFoundError(file)
            opened.append(Counting((folder / file).open("rb")))
            return opened[-1]

        return open_file

    monkeypatch.setattr(model_opening, "hub_opener", opener)
    picture = relpos.draw("someone/t5", length=20, layer=1)
    expected = model.encoder.block[0].layer[0].SelfAttention.compute_bias(20, 20)[0].detach()
    torch.testing.assert_close(torch.from_numpy(picture.maps[0].mean).float(), expected, atol=1e-6, rtol=0)
    tables = 2 * 8 * 4 * 4  # of encoder and decoder: buckets × heads × bytes
    header = int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    assert [file.read_bytes for file in opened] == [8 + header + tables]
    assert picture.numbers["model"]["bytes_fetched"] == 8 + header + tables


class Counting:
    """A file that counts what is read of it."""

    def __init__(self, file):
        self.file, self.read_bytes = file, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def seek(self, place):
        self.file.seek(place)

    def read(self, size):
        self.read_bytes += size
        return self.file.read(size)


class CreatesFile:
    """A pickle that creates a file when it is opened."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


class TestHostileFiles:
    @pytest.mark.parametrize(
        ("family", "file"),
        [(family, "pytorch_model.bin") for family in ("gpt2", "bert", "mistral")] + [("mistral", "adapter_model.bin")],
    )
    def test_a_malicious_pickle_is_not_opened_in_any_way(self, family, file, tmp_path, monkeypatch):
        folder, mark = saved(small_model(family), tmp_path / "model"), tmp_path / "ran"
        (folder / file).write_bytes(pickle.dumps({"weight": CreatesFile(mark)}))
        if file == "adapter_model.bin":
            (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        else:
            (folder / "model.safetensors").unlink()
        monkeypatch.setattr(torch, "load", lambda *arguments, **options: pytest.fail("a pickle is opened"))
        ways = [["draw", str(folder)], ["explore", str(folder), "--export", str(tmp_path / "page.html")]]
        ways += [["evaluate", str(folder), "--lengths", "8"], ["train", "--from", str(folder), "--out", str(mark)]]
        for arguments in ways:
            sentence = str(CliRunner().invoke(app, arguments).exception)
            assert f"{file} is a pickle, which can run any code when it is opened. If you trust it, convert" in sentence
        assert CliRunner().invoke(app, ["ls", str(folder)]).exit_code == 0  # from the configuration alone
        assert not mark.is_file()

    def test_a_configuration_that_names_a_pickle_is_refused(self, mistral):
        entries = json.loads((mistral / "config.json").read_text())
        (mistral / "config.json").write_text(json.dumps({**entries, "transformers_weights": "adapter_model.bin"}))
        with pytest.raises(ValueError, match=r"adapter_model\.bin is a pickle"):
            relpos.open(mistral)

    def test_a_model_of_ours_is_not_opened_from_a_pickle(self, tmp_path):
        folder = saved(relpos.transplant(small_model("gpt2"), "alibi"), tmp_path)
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        with pytest.raises(OSError, match=r"model\.safetensors"):
            AutoModelForCausalLM.from_pretrained(folder)
        with pytest.raises(ValueError, match="is a pickle"):
            relpos.open(folder)

    @pytest.mark.parametrize("name", ["x.pt", "x.bin"])
    def test_ls_of_a_pickle_says_so(self, name, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path(name).write_bytes(b"any")
        assert "is a pickle, which can run any code" in str(CliRunner().invoke(app, ["ls", name]).exception)

    @pytest.mark.parametrize(
        ("entry", "value", "sentence"),
        [
            ("hidden_size", 10**9, "a model of 549,000,000,000 parameters, 2,045.2 GB; this machine has"),
            ("vocab_size", 10**8, "of 3,200,015,520 parameters, 11.9 GB, and its weights have [0-9,]+ bytes"),
            ("vocab_size", 2**62, "overflowed with sizes=.4611686018427387904, 32."),
            ("hidden_size", 2**70, "hidden_size = 1,180,591,620,717,411,303,424; at most"),
            ("num_hidden_layers", 10**8, "num_hidden_layers = 100,000,000; at most 10,000"),
        ],
    )
    @pytest.mark.parametrize("command", ["draw", "ls"])
    def test_a_configuration_with_absurd_sizes_names_the_size(self, mistral, entry, value, sentence, command):
        entries = json.loads((mistral / "config.json").read_text())
        (mistral / "config.json").write_text(json.dumps({**entries, entry: value}))
        result = CliRunner().invoke(app, [command, str(mistral)])
        if command == "ls" and "parameters" in sentence:
            assert result.exit_code == 0  # nothing is built
            return
        assert isinstance(result.exception, ValueError)
        assert re.search(sentence, str(result.exception))
        assert len(str(result.exception)) < 400

    def test_a_pickle_is_refused_with_the_reason(self, mistral):
        tensors = load_file(mistral / "model.safetensors")
        (mistral / "model.safetensors").unlink()
        torch.save(tensors, mistral / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle, which can run any code"):
            relpos.open(mistral)
        with pytest.raises(ValueError, match="is a pickle, which can run any code"):
            relpos.open(mistral / "pytorch_model.bin")

    def test_a_missing_shard_is_named(self, tmp_path):
        folder = saved(small_model("mistral"), tmp_path)
        small_model("mistral").save_pretrained(folder, max_shard_size="20KB")
        (folder / "model.safetensors").unlink()
        shards = sorted(file.name for file in folder.glob("model-*.safetensors"))
        assert len(shards) > 1
        assert relpos.open(folder).family.name == "mistral"
        (folder / shards[1]).unlink()
        with pytest.raises(FileNotFoundError, match=f"{shards[1]} is missing"):
            relpos.open(folder)

    def test_an_index_that_leaves_the_folder_is_refused(self, mistral):
        (mistral / "model.safetensors").rename(mistral.parent / "elsewhere.safetensors")
        index = {"weight_map": {"model.embed_tokens.weight": "../elsewhere.safetensors"}}
        (mistral / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=r"'../elsewhere.safetensors', which is not a file in its folder"):
            relpos.open(mistral)

    def test_a_truncated_file_is_refused(self, mistral):
        file = mistral / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(ValueError, match=r"cannot be read: .*damaged or truncated"):
            relpos.open(mistral)

    def test_integers_in_place_of_weights_are_refused(self, mistral):
        file = mistral / "model.safetensors"
        tensors = load_file(file)
        name = "model.layers.0.self_attn.q_proj.weight"
        save_file({**tensors, name: tensors[name].to(torch.int32)}, file, {"format": "pt"})
        with pytest.raises(ValueError, match=f"holds integers .* {name}"):
            relpos.open(mistral)

    def test_a_configuration_that_lies_about_its_heads_is_refused(self, mistral):
        entries = json.loads((mistral / "config.json").read_text())
        for lie in ({"num_key_value_heads": 4}, {"num_hidden_layers": 3}, {"head_dim": 16}):
            (mistral / "config.json").write_text(json.dumps({**entries, **lie}))
            with pytest.raises(ValueError, match="do not fit its model"):
                relpos.open(mistral)

    def test_a_configuration_that_is_none_is_refused(self, mistral):
        for text in ("{", '{"model_type": "no such model"}', '{"model_type": "mistral", "hidden_size": "wide"}'):
            (mistral / "config.json").write_text(text)
            with pytest.raises(ValueError, match=r"config\.json"):
                relpos.open(mistral)

    def test_code_of_a_checkpoint_is_not_run(self, mistral):
        mark = mistral / "ran"
        entries = json.loads((mistral / "config.json").read_text())
        entries |= {"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}
        (mistral / "config.json").write_text(json.dumps(entries))
        (mistral / "code.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
        with pytest.raises(ValueError, match="trust_remote_code"):
            relpos.open(mistral)
        assert not mark.exists()

    def test_files_that_are_no_models_are_refused(self, tmp_path):
        (tmp_path / "notes.txt").write_text("no model")
        (tmp_path / "a.gguf").write_bytes(b"not a model")
        (tmp_path / "b.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(20))
        with pytest.raises(ValueError, match=r"notes.txt is a file: give the folder"):
            relpos.open(tmp_path / "notes.txt")
        with pytest.raises(ValueError, match="does not begin with the letters GGUF"):
            relpos.open(tmp_path / "a.gguf")
        with pytest.raises(ValueError, match=r"b\.gguf cannot be read"):
            relpos.open(tmp_path / "b.gguf")

    def test_a_folder_without_a_model_says_what_is_missing(self, mistral, tmp_path):
        (mistral / "model.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match=r"it has no model\.safetensors"):
            relpos.open(mistral)
        with pytest.raises(FileNotFoundError, match="no folder"):
            relpos.open(tmp_path / "nowhere")


def test_extra_tensors_do_no_harm(mistral):
    file = mistral / "model.safetensors"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_file({**load_file(file), "rotary.inv_freq": torch.ones(4)}, file, {"format": "pt"})
        assert relpos.open(mistral).family.name == "mistral"
    shutil.rmtree(mistral)
