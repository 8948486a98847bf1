"""A trained model with other positions: what stays, what is new, what is refused; and training from it."""

import json
import shutil

import pytest
import torch
import transformers
import yaml
from interrupted_training import interrupted_after, same_weights
from small_models import DECODERS, SIZES, TOKENS
from small_run import SMALL_RUN
from torch import nn
from transformers import CONFIG_MAPPING, GenerationConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import relpos
from relpos.comparison.comparison import make_comparison
from relpos.models import RelposBertConfig, RelposBertForMaskedLM, RelposLlamaForCausalLM
from relpos.runs.settings import load_settings
from relpos.text.corpus import open_corpus
from relpos.text.tokenizers import load_tokenizer
from relpos.training.model_and_data import open_data
from relpos.training.training import train

pytestmark = pytest.mark.heavy

ENTRIES = {
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 48},
    "llama": {**SIZES, "num_hidden_layers": 3, "num_key_value_heads": 2, "max_position_embeddings": 32},
}
CLASSES = {"gpt2": (GPT2Config, GPT2LMHeadModel), "llama": (LlamaConfig, LlamaForCausalLM)}
OWN = {"gpt2": "learned", "llama": "rope"}
ROPES = {  # of Llamas that people have
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "llama3": {
        **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
}
POSITION = ("wpe", "position", "embedding")  # in the names of the parameters of encodings


def build(family, **entries):
    """A small model of transformers whose parameters, biases included, are moved off their start."""
    torch.manual_seed(0)
    config, model = CLASSES[family]
    built = model(config(**{**TOKENS, **ENTRIES[family], "attn_implementation": "eager", **entries})).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return built


def ids(*shape):
    return torch.randint(3, TOKENS["vocab_size"], shape, generator=torch.Generator().manual_seed(1))


def not_shared(one, other):
    """The names of the weights that only one of two models has; those of both are equal."""
    ours, theirs = (dict(model.named_parameters()) for model in (one, other))
    for name in ours.keys() & theirs.keys():
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0, msg=name)
    return ours.keys() ^ theirs.keys()


def assert_same_logits(ours, model, **arguments):
    torch.testing.assert_close(ours(ids(2, 29)).logits, model(ids(2, 29), **arguments).logits, rtol=1e-4, atol=2e-6)


def encodings(model):
    return [type(layer.self_attn.position).__name__ for layer in model.model.layers]


class TestTheModelsOwnPositions:
    """With its own encoding a transplanted model is transformers' model."""

    @pytest.mark.parametrize(
        ("family", "entries"),
        [
            ("gpt2", {}),
            ("gpt2", {"tie_word_embeddings": False, "n_inner": 40, "scale_attn_by_inverse_layer_idx": True}),
            ("llama", {"attention_bias": True, "mlp_bias": True}),
            ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
            *(("llama", {"rope_parameters": parameters}) for parameters in ROPES.values()),
        ],
    )
    def test_logits_and_gradients_are_those_of_the_model(self, family, entries):
        model = build(family, **entries)
        ours = relpos.transplant(model, OWN[family])
        assert not_shared(ours, model) == set()
        tokens = ids(2, 29)
        expected, got = (each(tokens, labels=tokens, logits_to_keep=0) for each in (model, ours))
        torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=2e-6)
        for each in (expected.loss, got.loss):
            each.backward()
        gradients = dict(ours.named_parameters())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name].grad, parameter.grad, rtol=1e-3, atol=1e-6, msg=name)

    def test_it_writes_the_same_tokens_and_none_keeps_them(self):
        model = build("llama", rope_parameters=ROPES["yarn"])
        ours = relpos.transplant(model, "rope")
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
        assert torch.equal(ours.generate(ids(2, 7), **options), model.generate(ids(2, 7), **options))
        assert relpos.transplant(model, None).config.position == ours.config.position

    def test_nope_is_the_model_whose_rotation_does_not_turn(self):
        """DroPE's first step, against transformers with angles of 0."""
        model = build("llama")
        ours = relpos.transplant(model, "nope")
        model.model.rotary_emb.inv_freq.zero_()
        assert_same_logits(ours, model)

    def test_alibi_is_the_model_with_alibi_in_its_mask(self):
        model = build("gpt2")
        ours = relpos.transplant(model, "alibi")
        with torch.no_grad():
            model.transformer.wpe.weight.zero_()
        distance = torch.arange(29)[:, None] - torch.arange(29)
        slopes = 2.0 ** -torch.arange(2, 9, 2)  # 2^(−8h/4)
        bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, torch.finfo(torch.float32).min)
        assert_same_logits(ours, model, attention_mask=bias[None])


@pytest.mark.parametrize("family", CLASSES)
class TestWhatStays:
    @pytest.mark.parametrize("name", relpos.names())
    def test_all_weights_but_those_of_positions(self, family, name):
        model, options = build(family), {"length": 48} if name == "learned" else {}
        before = {key: value.clone() for key, value in model.state_dict().items()}
        ours = relpos.transplant(model, name, **options)
        other = not_shared(ours, model)
        assert all(any(word in key for word in POSITION) for key in other)
        assert any("wpe" in key for key in other) == (family == "gpt2" and name != "learned")
        assert not {p.data_ptr() for p in ours.parameters()} & {p.data_ptr() for p in model.parameters()}
        assert ours(ids(1, 29)).logits.isfinite().all()
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key])

    @pytest.mark.parametrize("tied", [True, False])
    def test_whether_embeddings_are_tied(self, family, tied):
        ours = relpos.transplant(build(family, tie_word_embeddings=tied), "kerple_log")
        assert (ours.get_output_embeddings().weight is ours.get_input_embeddings().weight) == tied
        assert ours.config.tie_word_embeddings == tied

    def test_special_tokens_generation_config_dtype_and_mode(self, family):
        model = build(family, unk_token_id=5, pad_token_id=4, eos_token_id=[2, 7]).to(torch.bfloat16).train()
        model.generation_config = GenerationConfig(temperature=0.3, top_k=7, do_sample=True, eos_token_id=[2, 7])
        ours = relpos.transplant(model, "cable")
        kept = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "vocab_size")
        assert [getattr(ours.config, key) for key in kept] == [getattr(model.config, key) for key in kept]
        assert ours.generation_config.to_dict() == model.generation_config.to_dict()
        assert ours.generation_config is not model.generation_config
        assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
        assert ours.training

    def test_the_callers_random_numbers_and_use_before_does_not_matter(self, family):
        model = relpos.use(build(family))
        torch.manual_seed(3)
        expected = torch.rand(4)
        torch.manual_seed(3)
        assert_same_logits(relpos.transplant(model, OWN[family]), model)
        assert torch.equal(torch.rand(4), expected)


class TestNewParameters:
    def test_have_their_start_values_by_seed(self):
        model = build("llama")
        one, same, other = (relpos.transplant(model, "fire", seed=seed) for seed in (1, 1, 2))
        assert not_shared(one, same) == set()
        first = dict(one.named_parameters())
        new = {name: parameter for name, parameter in other.named_parameters() if "position" in name}
        assert any(not torch.equal(parameter, first[name]) for name, parameter in new.items())
        inner = [layer.self_attn.position.inner.weight for layer in one.model.layers]
        assert not torch.equal(inner[0], inner[1])

    def test_stay_where_a_layer_keeps_its_encoding(self):
        trained = relpos.transplant(build("llama"), "kerple_log")
        with torch.no_grad():
            for layer in trained.model.layers:
                for parameter in layer.self_attn.position.parameters():
                    parameter.add_(0.5)
        plan = [{"layers": [2], "name": "nope"}, {"layers": [3], "name": "fire"}]
        ours = relpos.transplant(trained, {"name": "kerple_log", "plan": plan})
        assert encodings(ours) == ["KerpleLog", "Nope", "Fire"]
        kept, before = ours.model.layers[0].self_attn.position, trained.model.layers[0].self_attn.position
        assert not_shared(kept, before) == set()

    def test_of_one_encoding_for_all_layers(self):
        ours = relpos.transplant(build("gpt2"), "kerple_log", share_position=True)
        assert ours.transformer.position is not None
        assert all(block.attn.position is None for block in ours.transformer.h)
        assert relpos.transplant(ours, "kerple_log").config.share_position

    def test_of_a_plan_act_in_their_layers(self):
        model = build("llama")
        ours = relpos.transplant(model, {"name": "rope", "plan": [{"every": 2, "name": "nope"}]})
        assert encodings(ours) == ["Rope", "Nope", "Rope"]
        assert ours.config.position["rope_parameters"]["rope_theta"] == model.config.rope_parameters["rope_theta"]


def changed(family, change):
    """A model with one thing changed."""
    model = build(family)
    change(model)
    return model


def quantize(model):
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)


BERT = RelposBertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
REFUSED = [  # what is given, and the sentence
    (lambda: build("llama", hidden_act="gelu"), "LlamaForCausalLM .*hidden_act is 'gelu', but Llama has silu only"),
    (
        lambda: build("gpt2", activation_function="relu"),
        "GPT2LMHeadModel .*activation_function is 'relu', but",
    ),
    (lambda: build("gpt2", add_cross_attention=True), "cannot take GPT2LMHeadModel .*no cross-attention"),
    (
        lambda: changed("llama", lambda model: setattr(model.model.layers[1].self_attn, "q_norm", nn.RMSNorm(8))),
        r"it has unknown model\.layers\.1\.self_attn\.q_norm\.weight",
    ),
    (
        lambda: changed("gpt2", lambda model: setattr(model.lm_head, "weight", nn.Parameter(torch.zeros(8, 32)))),
        r"it has unknown lm_head\.weight",
    ),
    (lambda: build("llama").to("meta"), "weights are on the device meta"),
    (lambda: changed("llama", quantize), r"weights are quantized, as .*q_proj\.weight \(torch\.int8\)"),
    (lambda: build("llama").model, "cannot take LlamaModel"),
    (lambda: RelposBertForMaskedLM(BERT), r"cannot take RelposBertForMaskedLM .* relpos\.use\(model\) runs it"),
    (lambda: "models/llama", r"not str: open a folder with relpos\.open"),
]
POSITIONS = [
    ("llama", "kerpel_log", {}, "Did you mean 'kerple_log'"),
    ("llama", "alibi", {"slope": 3}, "unknown option of alibi 'slope'"),
    ("llama", {"name": "alibi", "plan": [{"layers": [9], "name": "nope"}]}, {}, "layers 1 to 3"),
    ("llama", {"length": 3}, {}, "position must name an encoding"),
    ("llama", "rope", {"scaling": "yarn"}, "override scaling: give complete rope_parameters"),
    ("gpt2", "learned", {"length": 96}, "has learned 48 positions, and a table of 96 would have to start anew"),
]


class TestRefusals:
    @pytest.mark.parametrize(("make", "sentence"), REFUSED)
    def test_what_the_family_cannot_express(self, make, sentence):
        with pytest.raises((TypeError, ValueError), match=sentence):
            relpos.transplant(make(), "alibi")

    @pytest.mark.parametrize(("family", "position", "options", "sentence"), POSITIONS)
    def test_positions_that_cannot_be(self, family, position, options, sentence):
        with pytest.raises(ValueError, match=sentence):
            relpos.transplant(build(family), position, **options)

    @pytest.mark.parametrize("family", [name for name in DECODERS if name in CONFIG_MAPPING and name not in CLASSES])
    def test_other_families_by_name(self, family):
        with torch.device("meta"):
            config = CONFIG_MAPPING[family](**{**TOKENS, **DECODERS[family]})
            model = transformers.AutoModelForCausalLM.from_config(config)
        with pytest.raises(ValueError, match=rf"{type(model).__name__} \(model type '\w+'\): it is not one of"):
            relpos.transplant(model, "alibi")


@pytest.fixture(scope="module")
def source(world):
    """A folder as people have them: transformers' Llama, with a tokenizer and a chat template."""
    tokenizer = load_tokenizer("bpe-280", open_corpus(str(world / "text.txt")))
    tokenizer.chat_template = "{{ messages[0].content }}"
    config = {"vocab_size": 288, "rope_parameters": ROPES["theta"], "eos_token_id": tokenizer.eos_token_id}
    model = build("llama", **config)
    model.generation_config.repetition_penalty = 1.3
    for part in (model, tokenizer):
        part.save_pretrained(world / "source")
    return world / "source"


@pytest.fixture(scope="module")
def settings(world, source):
    """Settings of a small run from the folder; overrides by dotted key."""

    def make(out, **overrides):
        own = {key: value for key, value in SMALL_RUN.items() if key not in ("data.tokenizer", "model.dropout")}
        own |= {"model.start": str(source), "model.encoding": "kerple_log", "data.source": str(world / "text.txt")}
        named = {key.replace("__", "."): value for key, value in overrides.items()}
        own |= {"run.out": str(out), "run.steps": 5, "run.save_every": 2, **named}
        return load_settings(None, {key: value for key, value in own.items() if value is not None})

    return make


@pytest.fixture(scope="module")
def tuned(world, settings):
    """The folder of a run from the model that was never stopped."""
    train(settings(world / "tuned"))
    return world / "tuned"


@pytest.mark.usefixtures("world")
class TestTrainingFromAModel:
    def test_starts_with_the_loss_of_the_transplanted_model(self, source, tuned, settings):
        run = relpos.open(source)
        windows = open_data(settings(tuned), run.tokenizer).heldout
        model = relpos.transplant(run, "kerple_log")
        batch = {key: torch.stack([window[key] for window in windows]) for key in windows[0]}
        result = json.loads((tuned / "result.json").read_text())
        assert result["heldout_at_start"] == pytest.approx(model(**batch).loss.item(), rel=1e-5)
        assert result["heldout"] < result["heldout_at_start"] - 0.001

    def test_leaves_a_model_that_everything_opens_and_that_says_where_it_started(self, source, tuned):
        model = transformers.AutoModelForCausalLM.from_pretrained(tuned)
        assert type(model) is RelposLlamaForCausalLM
        assert model.config.vocab_size == 288
        assert model.generation_config.repetition_penalty == 1.3
        assert transformers.AutoTokenizer.from_pretrained(tuned).chat_template == "{{ messages[0].content }}"
        run = relpos.open(tuned)
        assert (run.encoding, run.trained_length, run.family.name) == ("kerple_log", 16, "llama")
        assert "started from the weights of `source`" in (tuned / "README.md").read_text()
        rows = relpos.evaluate(run, lengths=[16], eval_tokens=32).results["tuned"]["rows"]
        assert rows[0]["perplexity"] > 1
        assert "kerple_log, Llama, layer 3 of 3" in relpos.draw(run, length=16).caption
        about = yaml.safe_load((tuned / "run.yaml").read_text())
        assert about["about"]["start"] == {"model": str(source), "checksum": relpos.open(source).checksum}
        assert (about["model"]["family"], about["model"]["preset"], about["data"]["tokenizer"]) == ("llama", None, None)

    def test_that_was_interrupted_ends_with_the_same_weights(self, settings, tuned, tmp_path):
        with interrupted_after(3):
            train(settings(tmp_path))
        train(settings(tmp_path))
        assert same_weights(tmp_path, tuned)

    def test_is_not_resumed_from_other_weights(self, source, settings, tuned, tmp_path):
        folder, out = tmp_path / "source", tmp_path / "out"
        shutil.copytree(source, folder)
        train(settings(out, model__start=str(folder), run__steps=1))
        model = LlamaForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            model.model.norm.weight[0] += 1e-3
        model.save_pretrained(folder)
        with pytest.raises(ValueError, match=f"the weights of {folder} have changed since {out} was started"):
            train(settings(out, model__start=str(folder), run__steps=2))

    def test_without_an_encoding_keeps_the_models_own(self, source, settings, tmp_path):
        train(settings(tmp_path, model__encoding=None, run__steps=1))
        run = relpos.open(tmp_path)
        assert run.model.config.position == relpos.open(source).model.config.position
        assert run.settings.model.options == {"rope_parameters": {"max_position_embeddings": 32, **ROPES["theta"]}}
        again = relpos.train(from_model=tmp_path, data=run.settings.data.source, length=16, batch_size=4, steps=1,
                             out=tmp_path / "again", overrides={"run.eval_windows": 4})  # fmt: skip
        assert again.result["heldout_at_start"] == pytest.approx(run.result["heldout"], rel=1e-5)

    def test_in_half_precision_is_trained_in_float32(self, source, settings, tmp_path):
        shutil.copytree(source, tmp_path / "half")
        LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
        assert relpos.open(tmp_path / "half").model.dtype == torch.bfloat16
        train(settings(tmp_path / "out", model__start=str(tmp_path / "half"), run__steps=1))
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"model__preset": "nano"}, "leave out model.preset=nano, or --from"),
            ({"data__tokenizer": "gpt2"}, "leave out data.tokenizer=gpt2"),
            ({"data__task": "recall"}, "leave out data.task=recall"),
            ({"model__vocab_size": 300}, "leave out model.vocab_size=300"),
            ({"model__family": "gpt2"}, "is a Llama, but model.family=gpt2 was requested"),
            ({"model__family": "bert"}, "only a GPT-2 or a Llama can be started from, not BERT"),
            ({"model__dropout": 0.1}, "Llama has no dropout"),
            ({"model__encoding": "alibi", "model__options": {"slope": 1}}, "unknown option of alibi"),
            ({"model__start": "/nowhere/model"}, "there is no folder /nowhere/model"),
        ],
    )
    def test_refuses_what_contradicts_the_model(self, settings, tmp_path, change, sentence):
        with pytest.raises((ValueError, FileNotFoundError), match=sentence):
            train(settings(tmp_path / "out", **change))

    def test_refuses_a_generation_config_that_could_not_be_saved(self, source, settings, tmp_path):
        shutil.copytree(source, tmp_path / "source")
        (tmp_path / "source" / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.5}')
        with pytest.raises(ValueError, match=r"the generation_config\.json of .* cannot be saved again: .*temperature"):
            train(settings(tmp_path / "out", model__start=str(tmp_path / "source")))

    def test_does_not_write_over_the_model_and_is_not_for_comparisons(self, source, settings, tmp_path):
        with pytest.raises(ValueError, match="is the model that the run starts from"):
            settings(source)
        with pytest.raises(ValueError, match="a comparison trains from random weights"):
            make_comparison(tmp_path, settings={"model.start": "models/llama"})

    def test_has_a_folder_named_after_the_model_and_lower_rates(self):
        own = load_settings(None, {"model.start": "models/smol.gguf", "model.encoding": "fire"})
        assert own.run.out == "runs/smol-fire"
        assert own.optimizer.lr < load_settings(None, {"model.preset": "small"}).optimizer.lr
        assert load_settings(None, {"model.start": "hub/Smol-1.7B"}).run.out == "runs/Smol-1.7B-tuned"
