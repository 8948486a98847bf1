"""Models that other people trained: opened, scored and drawn as their own code computes them."""

import json
import pickle
import re
import warnings
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import GROUPED, SIZES, TEXT, TOKENS, WINDOW, kind_of, saved, small_model, word_tokenizer, write_words
from torch.nn import functional as F
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    MPNetConfig,
    MPNetForMaskedLM,
    MPNetModel,
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

BOS = 1  # of all small models
OWN_CODE = ["mistral", "gemma2", "gpt_oss", "cohere2", "bloom", "mpt", "opt", "roberta", "modernbert", "mpnet"]
OWN_CODE += ["deberta", "deberta-v2"]
SMALL = {**{name: SIZES[name] for name in SIZES if name != "max_position_embeddings"}, "vocab_size": 64}
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def quietly(run, lengths, tmp_path, **options):
    options = {"data": str(tmp_path / "text.txt"), "out": tmp_path / "out", "say": lambda line: None, **options}
    return evaluate(run, lengths, **options)["rows"]


def assert_drawn(picture, expected, tolerance=1e-5):
    drawn = torch.from_numpy(picture.maps[0].mean).nan_to_num().float()
    torch.testing.assert_close(drawn, expected, atol=tolerance, rtol=0)


def change(file: Path, **entries) -> None:
    """Replace entries of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


@pytest.fixture
def mistral(tmp_path) -> Path:
    return saved(small_model("mistral"), tmp_path / "mistral")


@torch.no_grad()
@pytest.mark.parametrize("family", OWN_CODE)
def test_weights_and_perplexity_are_those_of_the_models_own_code(family, tmp_path):
    model = small_model(family)
    run = relpos.open(saved(model, tmp_path / "model"))
    assert type(run.model) is type(model)
    picture = relpos.draw(run, text=TEXT, layer=2, show="weights")
    model.set_attn_implementation("eager")
    before = [] if kind_of(family) == "encoder" else [BOS]
    ids = torch.tensor([[*before, *word_tokenizer()(TEXT)["input_ids"]]])
    assert_drawn(picture, model(ids, output_attentions=True).attentions[1][0])

    words = torch.tensor(write_words(tmp_path / "text.txt", 129))
    row = quietly(run, [32], tmp_path)[0]
    targets = words[1:129].view(4, 32)
    if kind_of(family) == "encoder":
        masked = torch.from_numpy(masked_places(np.arange(1, 129))).view(4, 32)
        read, targets = targets.masked_fill(masked, 4), targets.masked_fill(~masked, -100)
    else:
        read = words[:128].view(4, 32).clone()
        read[:, 0] = BOS  # in the place of a token that is read and not scored
    expected = F.cross_entropy(model(read).logits.flatten(0, 1), targets.flatten())
    assert row["error"] is None
    assert row["loss"] == pytest.approx(float(expected), rel=1e-5)


@torch.no_grad()
def test_a_t5_shows_its_bias_and_a_refused_family_its_attention_weights(tmp_path):
    model = small_model("t5")
    run = relpos.open(saved(model, tmp_path / "t5"))
    expected = model.encoder.block[0].layer[0].SelfAttention.compute_bias(17, 17)[0]
    assert_drawn(relpos.draw(run, text=TEXT, layer=1, show="bias"), expected)
    torch.manual_seed(0)
    model = RoFormerForMaskedLM(RoFormerConfig(**SMALL)).eval()
    run = relpos.open(saved(model, tmp_path / "roformer"))
    assert "roformer" in run.family.refusal
    expected = model(torch.tensor([word_tokenizer()(TEXT)["input_ids"]]), output_attentions=True).attentions[0][0]
    assert_drawn(relpos.draw(run, text=TEXT, layer=1, show="weights"), expected)


def test_a_model_without_a_head_is_drawn_but_not_scored_and_one_of_images_says_so(tmp_path):
    run = relpos.open(saved(BertModel(BertConfig(**SMALL)), tmp_path / "bert"))
    assert relpos.draw(run, text=TEXT).maps[0].heads == 4
    with pytest.raises(ValueError, match="BertModel predicts no tokens, so it has no perplexity"):
        evaluate(run, [8], say=lambda line: None)
    ViTModel(ViTConfig(**{**SIZES, "image_size": 32, "patch_size": 8})).save_pretrained(tmp_path / "vit")
    with pytest.raises(ValueError, match="ViTModel reads pixel_values, not text"):
        relpos.draw(relpos.open(tmp_path / "vit"), length=4)


@torch.no_grad()
@pytest.mark.parametrize("pooler", [True, False])
def test_a_model_whose_file_lacks_its_head_opens_without_it(tmp_path, pooler):
    torch.manual_seed(0)
    model = MPNetModel(MPNetConfig(**SMALL), add_pooling_layer=pooler).eval()
    change(saved(model, tmp_path) / CONFIG, architectures=["MPNetForMaskedLM"])
    with pytest.warns(UserWarning, match=r"lacks lm_head.* MPNetModel is opened, which has no head and predicts no"):
        run = relpos.open(tmp_path)
    assert type(run.model) is MPNetModel
    ids = torch.arange(5, 20)[None]
    torch.testing.assert_close(run.model(ids)[0], model(ids)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "bert", "mistral"])
def test_so_does_one_of_our_families(tmp_path, family):
    model = small_model(family, tie_word_embeddings=False)
    file, prefix = saved(model, tmp_path) / WEIGHTS, f"{model.base_model_prefix}."
    tensors = {name: tensor for name, tensor in load_file(file).items() if name.startswith(prefix)}
    save_file(tensors, file, {"format": "pt"})
    with pytest.warns(UserWarning, match="which has no head and predicts no tokens"):
        run = relpos.open(tmp_path)
    assert type(run.model) is type(model.base_model)
    tensors.popitem()
    save_file(tensors, file)
    with pytest.raises(ValueError, match="do not fit its model"):
        relpos.open(tmp_path)


@pytest.mark.parametrize(
    ("config", "model_class"), [(RobertaConfig, RobertaForMaskedLM), (MPNetConfig, MPNetForMaskedLM)]
)
def test_rows_for_padding_are_no_positions(tmp_path, config, model_class):
    torch.manual_seed(0)
    folder = saved(model_class(config(**SMALL, max_position_embeddings=34, pad_token_id=1)), tmp_path)
    run = relpos.open(folder)
    assert run.trained_length == listed(folder)["trained_length"] == 32
    assert relpos.draw(run, text="w05 " * 40, length=32, show="weights").maps[0].length == 32
    for length in (33, 34):
        with pytest.raises(ValueError, match=f"has a table of 32 positions, and the input has {length} tokens"):
            relpos.draw(run, text="w05 " * 40, length=length, show="weights")
    (tmp_path / "text.txt").write_text("w05 " * 99)
    rows = quietly(run, [32, 34], tmp_path)
    assert rows[0]["error"] is None
    assert "a table of 32 positions" in rows[1]["error"]


@torch.no_grad()
def test_a_scaled_rope_is_that_of_transformers_and_can_be_evaluated(tmp_path):
    model = small_model("qwen3", use_sliding_window=False, layer_types=None, max_position_embeddings=16)
    folder = saved(model, tmp_path / "model")
    scaling = {"rope_type": "linear", "factor": 4.0}  # 64 / 16
    config = model.config
    config.rope_parameters = {**config.rope_parameters, **scaling}
    expected = type(model).from_pretrained(folder, config=config, attn_implementation="eager").eval()
    ids = torch.arange(5, 45)[None]
    run = relpos.open(folder, {"name": "rope", "rope_parameters": scaling})
    torch.testing.assert_close(run.model(ids).logits, expected(ids).logits, atol=1e-4, rtol=1e-4)
    words = write_words(tmp_path / "text.txt", 65)
    loss = F.cross_entropy(expected(torch.tensor([[BOS, *words[1:64]]])).logits[0], torch.tensor(words[1:]))
    row = quietly(relpos.open(folder), [64], tmp_path, rope_scaling="linear")[0]
    assert row["loss"] == pytest.approx(float(loss), rel=1e-5)


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
    model = small_model("t5")
    folder = saved(model, hub_model(tmp_path, monkeypatch, "someone/t5"))
    read = []

    class Counting:
        """A file that counts what is read of it."""

        def __init__(self, name):
            self.file = (folder / name).open("rb")
            self.seek = self.file.seek

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def read(self, size):
            read.append(size)
            return self.file.read(size)

    monkeypatch.setattr(model_opening, "hub_opener", lambda name: Counting)
    picture = relpos.draw("someone/t5", length=20, layer=1)
    assert_drawn(picture, model.encoder.block[0].layer[0].SelfAttention.compute_bias(20, 20)[0].detach(), 1e-6)
    tables = 2 * 8 * 4 * 4  # of encoder and decoder: buckets × heads × bytes
    header = int.from_bytes((folder / WEIGHTS).read_bytes()[:8], "little")
    assert sum(read) == picture.numbers["model"]["bytes_fetched"] == 8 + header + tables


def listed(folder) -> dict:
    """What `relpos ls` says of a model."""
    return json.loads(CliRunner().invoke(app, ["ls", str(folder), "--json"]).stdout)


class TestLs:
    """relpos ls MODEL: what a configuration says, in words and as JSON."""

    def test_prints_a_model_in_words(self, tmp_path):
        CONFIG_MAPPING["gemma2"](**GROUPED, sliding_window=WINDOW).save_pretrained(tmp_path)
        printed = " ".join(CliRunner().invoke(app, ["ls", str(tmp_path)]).stdout.split())
        assert "(model type gemma2)" in printed
        assert "heads 4, head_dim 8, 2 key heads length 64 tokens" in printed
        assert "layer 1: RoPE, theta 10,000, all 8 dimensions, half layout; window 8; softcap 50" in printed
        assert "relpos.use yes (checked by one small forward) relpos.transplant no" in printed

    @pytest.mark.parametrize(
        ("kind", "settings", "expected"),
        [
            (
                "deberta",
                {**SIZES, "talking_head": True},
                {
                    **{"layers": 2, "heads": 4, "trained_length": 64, "use": False},
                    "positions": ["layers 1–2: learned positions, 64 × 32, added to the embedding"],
                },
            ),
            (
                "relpos_llama",
                {**GROUPED, "position": {"name": "rope", "plan": [{"every": 2, "name": "nope"}]}},
                {"positions": ["layer 1: relpos rope", "layer 2: relpos nope"], "use": True, "transplant": True},
            ),
            ("roberta", {**TOKENS, **SIZES, "pad_token_id": 1, "max_position_embeddings": 66}, {"trained_length": 64}),
        ],
    )
    def test_prints_json(self, kind, settings, expected, tmp_path):
        CONFIG_MAPPING[kind](**settings).save_pretrained(tmp_path)
        assert listed(tmp_path).items() >= expected.items()

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["kerpel_log"], "Did you mean 'kerple_log'?"),
            (["."], "it has no config.json"),
            (["nowhere/model.gguf"], "there is no file nowhere/model.gguf"),
            ([".", "--markdown"], "--markdown is for encodings"),
            (["x.pt"], "is a pickle, which can run any code"),
            (["x.bin"], "is a pickle, which can run any code"),
        ],
    )
    def test_refuses_with_a_sentence(self, arguments, sentence, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for name in ("x.pt", "x.bin"):
            Path(name).write_bytes(b"any")
        assert sentence in str(CliRunner().invoke(app, ["ls", *arguments]).exception)

    def test_takes_an_encoding_s_name_before_a_folder(self, tmp_path, monkeypatch):
        (tmp_path / "alibi").mkdir()
        monkeypatch.chdir(tmp_path)
        assert "ALiBi: a linear penalty" in CliRunner().invoke(app, ["ls", "alibi"]).stdout


class CreatesFile:
    """A pickle that creates a file when it is opened."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


def truncate(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


def leave_folder(folder):
    (folder / WEIGHTS).rename(folder.parent / "elsewhere.safetensors")
    (folder / INDEX).write_text('{"weight_map": {"model.embed_tokens.weight": "../elsewhere.safetensors"}}')


def save_integers(folder):
    tensors = load_file(folder / WEIGHTS)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int32)}, folder / WEIGHTS, {"format": "pt"})


def ask_for_code(folder):
    change(folder / CONFIG, model_type="own", auto_map={"AutoConfig": "code.Config"})
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")


def lose_shard(folder):
    small_model("mistral").save_pretrained(folder, max_shard_size="20KB")
    (folder / WEIGHTS).unlink()
    assert relpos.open(folder).family.name == "mistral"
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


DAMAGES = {  # what is done to a folder, and what the sentence says
    "a configuration that names a pickle": (
        lambda folder: change(folder / CONFIG, transformers_weights="adapter_model.bin"),
        r"adapter_model\.bin is a pickle",
    ),
    "a missing shard": (lose_shard, r"names \d files, and model-00002-.* is missing"),
    "a file outside": (leave_folder, "'../elsewhere.safetensors', which is not a file in its folder"),
    "an index that is none": (
        lambda folder: (folder / WEIGHTS).rename(folder / INDEX).write_text("[]"),
        "index.json cannot be read: .* Copy it again",
    ),
    "a truncated file": (truncate, "cannot be read: .*damaged or truncated"),
    "integers": (save_integers, r"holds integers .* model\.layers\.0\.self_attn\.q_proj\.weight"),
    "other key heads": (lambda folder: change(folder / CONFIG, num_key_value_heads=4), "do not fit its model"),
    "other layers": (lambda folder: change(folder / CONFIG, num_hidden_layers=3), "do not fit its model"),
    "other sizes": (lambda folder: change(folder / CONFIG, head_dim=16), "do not fit its model"),
    "half a configuration": (lambda folder: (folder / CONFIG).write_text("{"), r"config\.json"),
    "an unknown type": (lambda folder: change(folder / CONFIG, model_type="no such model"), r"config\.json"),
    "words for numbers": (lambda folder: change(folder / CONFIG, hidden_size="wide"), r"config\.json"),
    "code": (ask_for_code, "trust_remote_code"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), r"it has no model\.safetensors"),
}


class TestHostileFiles:
    @pytest.mark.parametrize("name", DAMAGES)
    def test_are_refused_with_the_reason(self, name, mistral):
        damage, sentence = DAMAGES[name]
        damage(mistral)
        with pytest.raises((ValueError, FileNotFoundError), match=sentence):
            relpos.open(mistral)
        assert not (mistral / "ran").exists()

    @pytest.mark.parametrize(
        ("content", "sentence"),
        [
            ("notes.txt", r"notes\.txt is a file: give the folder"),
            ("a.gguf", "does not begin with the letters GGUF"),
            ("b.gguf", r"b\.gguf cannot be read"),
            ("pytorch_model.bin", "is a pickle, which can run any code"),
            ("nowhere", "no folder"),
        ],
    )
    def test_that_are_no_models_are_refused(self, content, sentence, tmp_path):
        if content != "nowhere":
            data = b"GGUF\x03\x00\x00\x00" + bytes(20) if content == "b.gguf" else b"not a model"
            (tmp_path / content).write_bytes(data)
        with pytest.raises((ValueError, FileNotFoundError), match=sentence):
            relpos.open(tmp_path / content)

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
            (folder / WEIGHTS).unlink()
        monkeypatch.setattr(torch, "load", lambda *arguments, **options: pytest.fail("a pickle is opened"))
        ways = [["draw", str(folder)], ["explore", str(folder), "--export", str(tmp_path / "page.html")]]
        ways += [["evaluate", str(folder), "--lengths", "8"], ["train", "--from", str(folder), "--out", str(mark)]]
        for arguments in ways:
            sentence = str(CliRunner().invoke(app, arguments).exception)
            assert f"{file} is a pickle, which can run any code when it is opened. If you trust it, convert" in sentence
        assert CliRunner().invoke(app, ["ls", str(folder)]).exit_code == 0  # from the configuration alone
        assert not mark.is_file()

    def test_a_model_of_ours_is_not_opened_from_a_pickle(self, tmp_path):
        folder = saved(relpos.transplant(small_model("gpt2"), "alibi"), tmp_path)
        torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
        (folder / WEIGHTS).unlink()
        with pytest.raises(OSError, match=r"model\.safetensors"):
            AutoModelForCausalLM.from_pretrained(folder)
        with pytest.raises(ValueError, match="is a pickle"):
            relpos.open(folder)

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
    def test_absurd_sizes_are_named(self, mistral, entry, value, sentence):
        change(mistral / CONFIG, **{entry: value})
        for command in ("draw", "ls"):
            result = CliRunner().invoke(app, [command, str(mistral)])
            if command == "ls" and "parameters" in sentence:
                assert result.exit_code == 0  # nothing is built
            else:
                assert isinstance(result.exception, ValueError)
                assert re.search(sentence, str(result.exception))
                assert len(str(result.exception)) < 400


def test_extra_tensors_do_no_harm(mistral):
    file = mistral / WEIGHTS
    save_file({**load_file(file), "rotary.inv_freq": torch.ones(4)}, file, {"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert relpos.open(mistral).family.name == "mistral"
