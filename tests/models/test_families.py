"""Every family of models: the same numbers as transformers' own, and the interface that the rest of relpos uses."""

import pytest
import torch
import transformers
from torch.nn import functional as F

import relpos
from relpos.forms.encoding import Encoding
from relpos.model_catalogue import Preset
from relpos.models import FAMILIES
from relpos.models.family import family_of, get_family
from relpos.models.plan import layer_encodings, make_positions

pytestmark = pytest.mark.heavy

VOCABULARY = 61
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
ORIGINALS = {  # the encoding under which a family is transformers' own model, and that model
    "gpt2": ("learned", transformers.GPT2Config, transformers.GPT2LMHeadModel),
    "llama": ("rope", transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "bert": ("learned", transformers.BertConfig, transformers.BertForMaskedLM),
}
OWN = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_positions": 64},
    "llama": {"num_key_value_heads": 2, "intermediate_size": 48, "attn_implementation": "eager"},
    "bert": {"intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
CAUSAL = [name for name, entry in FAMILIES.items() if entry.causal and name != "gpt2"]  # which has tests of its own
POSITIONS = ["kerple_log", "cable", "rope", "fire", "learned", "cope"]


def ids(*shape):
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def build(family, position=None, **entries):
    """A small model whose parameters are moved off their start."""
    torch.manual_seed(0)
    own = get_family(family)
    options = {key: value for key, value in OWN.get(family, {}).items() if key != "attn_implementation"}
    sizes = {"vocab_size": VOCABULARY, **own.sizes(Preset(layers=3, heads=4, width=32, lr=1e-3))}
    model = own.model_class(own.config_class(**{**sizes, **options, "position": position, **entries})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def theirs(family):
    torch.manual_seed(0)
    _, config, model = ORIGINALS[family]
    return model(config(**{**SIZES, **OWN[family]})).eval()


def padded():
    """Tokens with padding on the right, and labels that do not count it."""
    tokens, mask = ids(2, 23), torch.ones(2, 23, dtype=torch.long)
    mask[1, 15:] = 0
    return tokens, mask, tokens.masked_fill(mask == 0, -100)


@pytest.mark.parametrize("family", ORIGINALS)
class TestTransformersOwn:
    """A family with the encoding that its model is published with."""

    def test_opens_in_ours_with_the_same_logits_loss_and_gradients(self, family, tmp_path):
        reference = theirs(family)
        reference.save_pretrained(tmp_path)
        ours = get_family(family).model_class.from_pretrained(tmp_path).eval()
        assert ours.config.position["name"] == ORIGINALS[family][0]
        tokens, mask, labels = padded()
        logits = ours(tokens, attention_mask=mask).logits
        expected = reference(tokens, attention_mask=mask, labels=labels)
        torch.testing.assert_close(logits[mask.bool()], expected.logits[mask.bool()], rtol=1e-4, atol=1e-5)
        loss = ours(tokens, attention_mask=mask, labels=labels).loss
        torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-6)
        loss.backward()
        expected.loss.backward()
        named = dict(ours.named_parameters())
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(
                named[name].grad, parameter.grad, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )

    def test_opens_ours_with_the_same_logits(self, family, tmp_path):
        ours = build(family)
        ours.save_pretrained(tmp_path)
        reference = ORIGINALS[family][2].from_pretrained(tmp_path).eval()
        tokens, mask, _ = padded()
        expected = reference(tokens, attention_mask=mask).logits
        got = ours(tokens, attention_mask=mask).logits
        torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)

    def test_starts_with_weights_of_the_same_spread(self, family):
        torch.manual_seed(0)
        own, (_, config, model) = get_family(family), ORIGINALS[family]
        wide = {**SIZES, **OWN[family], "hidden_size": 128}
        reference = model(config(**wide))
        options = {key: value for key, value in wide.items() if key != "attn_implementation"}
        ours = dict(own.model_class(own.config_class(**options)).named_parameters())
        for name, parameter in reference.named_parameters():
            if parameter.numel() > 1000:
                assert float(ours[name].detach().std() / parameter.detach().std()) == pytest.approx(1, abs=0.15), name
            else:
                torch.testing.assert_close(ours[name].mean(), parameter.mean(), atol=0.02, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["kerple_log", "cable", "rope", "learned"])
def test_the_auto_classes_open_what_a_family_saves(family, name, tmp_path):
    model = build(family, name)
    model.save_pretrained(tmp_path)
    again = getattr(transformers, FAMILIES[family].auto_class).from_pretrained(tmp_path)
    assert type(again) is type(model)
    torch.testing.assert_close(again.eval()(ids(1, 9)).logits, model(ids(1, 9)).logits, rtol=0, atol=0)
    inner = transformers.AutoModel.from_pretrained(tmp_path).eval()
    hidden = get_family(family).hidden(model, ids(1, 9))
    uncached = {"use_cache": False} if FAMILIES[family].causal else {}  # as `hidden`: a cache rotates keys by itself
    torch.testing.assert_close(inner(ids(1, 9), **uncached).last_hidden_state, hidden, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["kerple_log", "cable", "rope", "learned", "nope"])
class TestTheInterface:
    def test_hidden_states_times_the_output_matrix_are_the_logits(self, family, name):
        model = build(family, name)
        own = family_of(model)
        assert own is get_family(family)
        output = own.output(model, own.hidden(model, ids(2, 11)))
        logits = F.linear(output.states, output.weight, output.bias)
        torch.testing.assert_close(logits, model(ids(2, 11)).logits, rtol=1e-5, atol=1e-6)

    def test_layers_have_what_a_picture_needs(self, family, name):
        model = build(family, name)
        layers = family_of(model).layers(model)
        assert len(layers) == SIZES["num_hidden_layers"]
        x = torch.randn(2, 7, SIZES["hidden_size"])
        for layer in layers:
            q, k, v = layer.attention.project(x)
            attention = layer.attention
            assert q.shape == (2, attention.heads, 7, attention.head_dim)
            assert k.shape == v.shape == (2, attention.key_heads, 7, attention.head_dim)
            assert attention.causal == FAMILIES[family].causal
            assert (layer.position is None) == (name == "learned")
            gates = {} if layer.position is None else {"gates": layer.position.gates(x)}
            out = relpos.attention(q, k, v, layer.position, causal=attention.causal, scale=attention.scale, **gates)
            expected = attention(x)
            torch.testing.assert_close(attention.merge(out.transpose(1, 2).flatten(2)), expected)

    def test_packed_documents_are_separate_documents(self, family, name):
        model = build(family, name)
        tokens, documents = ids(1, 17), torch.tensor([[0] * 6 + [1] * 11])
        both = get_family(family).hidden(model, tokens, documents)
        alone = [get_family(family).hidden(model, part) for part in (tokens[:, :6], tokens[:, 6:])]
        torch.testing.assert_close(both, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("name", POSITIONS)
def test_decoding_with_a_cache_is_the_whole_sequence(family, name):
    """Gates travel in the cache, also where a key head serves several heads."""
    model, tokens = build(family, name), ids(2, 12)
    whole = model(tokens).logits
    cache, steps = None, []
    for part in (tokens[:, :5], *tokens[:, 5:].split(1, dim=1)):
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-4, atol=1e-5)


def test_llama_generates_what_transformers_llama_generates(tmp_path):
    reference = theirs("llama")
    reference.save_pretrained(tmp_path)
    ours = get_family("llama").model_class.from_pretrained(tmp_path).eval()
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(ours.generate(ids(2, 6), **options), reference.generate(ids(2, 6), **options))


def test_bert_sees_later_tokens_and_the_causal_families_do_not():
    for family in FAMILIES:
        model, tokens = build(family, "kerple_log"), ids(1, 9)
        changed = tokens.clone()
        changed[0, -1] = (changed[0, -1] + 1) % VOCABULARY
        moved = (model(tokens).logits - model(changed).logits).abs().amax(dim=-1)[0, :-1]
        assert bool((moved > 0).all()) != FAMILIES[family].causal
        assert bool((moved == 0).all()) == FAMILIES[family].causal


class TestPlans:
    """Layers with different encodings."""

    def test_nope_in_every_second_layer_is_smollm3(self):
        config = transformers.SmolLM3Config(
            **SIZES,
            **OWN["llama"],
            no_rope_layers=[1, 0, 1],
            pad_token_id=0,
            rope_theta=10000.0,
            use_sliding_window=False,
        )
        torch.manual_seed(0)
        reference = transformers.SmolLM3ForCausalLM(config).eval()
        rope = {"name": "rope", "rope_parameters": config.rope_parameters}
        ours = build(
            "llama", {**rope, "plan": [{"every": 2, "name": "nope"}]}, tie_word_embeddings=config.tie_word_embeddings
        )
        ours.load_state_dict(reference.state_dict())
        torch.testing.assert_close(ours(ids(2, 19)).logits, reference(ids(2, 19)).logits, rtol=1e-4, atol=1e-5)

    def test_a_window_in_all_layers_is_mistral(self):
        options = {key: value for key, value in OWN["llama"].items() if key != "attn_implementation"}
        config = transformers.MistralConfig(**SIZES, **options, sliding_window=5, attn_implementation="eager")
        torch.manual_seed(0)
        reference = transformers.MistralForCausalLM(config).eval()
        rope = {"name": "rope", "rope_parameters": config.rope_parameters}
        ours = build("llama", {**rope, "plan": [{"every": 1, "window": 5}]})
        ours.load_state_dict(reference.state_dict())
        torch.testing.assert_close(ours(ids(2, 19)).logits, reference(ids(2, 19)).logits, rtol=1e-4, atol=1e-5)
        whole = build("llama", rope)
        whole.load_state_dict(reference.state_dict())
        assert (whole(ids(2, 19)).logits - reference(ids(2, 19)).logits).abs().max() > 1e-3

    @pytest.mark.parametrize("family", FAMILIES)
    def test_each_layer_has_the_encoding_of_its_rule(self, family, tmp_path):
        plan = [{"every": 2, "base": 500.0}, {"layers": [3], "name": "kerple_log"}]
        model = build(family, {"name": "rope", "base": 100.0, "plan": plan})
        positions = [layer.position for layer in family_of(model).layers(model)]
        assert [type(position).__name__ for position in positions] == ["Rope", "Rope", "KerpleLog"]
        assert [position.options["base"] for position in positions[:2]] == [100.0, 500.0]
        model.save_pretrained(tmp_path)
        again = get_family(family).model_class.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(again(ids(1, 9)).logits, model(ids(1, 9)).logits, rtol=0, atol=0)

    def test_an_encoding_of_the_embedding_acts_once_beside_the_plan(self):
        made = make_positions({"name": "learned", "plan": [{"layers": [2], "name": "alibi"}]}, False, 3, 4, 8)
        assert isinstance(made.embedding, Encoding)
        assert [None if own is None else type(own).__name__ for own in made.layers] == [None, "Alibi", None]

    @pytest.mark.parametrize(
        ("plan", "sentence"),
        [
            ([{"every": 0, "name": "nope"}], "every must be a positive integer, not 0"),
            ([{"layers": [4], "name": "nope"}], "names layer 4, but the model has layers 1 to 3"),
            ([{"name": "nope"}], "must have either layers or every"),
            ([{"layers": [1], "every": 2, "name": "nope"}], "must have either layers or every"),
            ([{"every": 2}], "changes nothing"),
            (["nope"], "changes nothing"),
            ("nope", "a plan is a list of rules"),
            ([{"every": 2, "name": "learned"}], "learned acts once, on the token embedding"),
            ([{"every": 2, "name": "alibbi"}], "Did you mean 'alibi'"),
            ([{"every": 2, "theta": 5}], "rope has no option 'theta': it is called 'base' here"),
        ],
    )
    def test_a_rule_that_is_not_valid_is_refused_with_a_sentence(self, plan, sentence):
        with pytest.raises(ValueError, match=sentence):
            make_positions({"name": "rope", "plan": plan}, False, 3, 4, 8)

    def test_layers_that_share_an_encoding_have_no_plan(self):
        with pytest.raises(ValueError, match="share one encoding cannot have a plan"):
            make_positions({"name": "rope", "plan": [{"every": 2, "name": "nope"}]}, True, 3, 4, 8)

    def test_later_rules_act_on_what_earlier_ones_left(self):
        plan = [{"every": 1, "base": 5.0}, {"layers": 2, "window": 9}]
        assert layer_encodings({"name": "rope", "plan": plan}, 2) == [
            {"name": "rope", "base": 5.0},
            {"name": "rope", "base": 5.0, "window": 9},
        ]


@pytest.mark.parametrize("family", [family for family, (encoding, *_) in ORIGINALS.items() if encoding == "learned"])
def test_the_configuration_of_transformers_follows_the_size_of_a_learned_table(family, tmp_path):
    model = build(family, {"name": "learned", "length": 40})
    model.save_pretrained(tmp_path)
    reference = ORIGINALS[family][2].from_pretrained(tmp_path).eval()
    torch.testing.assert_close(reference(ids(1, 40)).logits, model(ids(1, 40)).logits, rtol=1e-4, atol=1e-5)
    with pytest.raises((IndexError, RuntimeError)):
        reference(ids(1, 41))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_presets_of_a_family_have_its_sizes(family):
    own = get_family(family)
    for name in ("nano", "small"):
        config = own.config_class.preset(name, vocab_size=100, position="nope")
        preset = relpos.models.PRESETS[name]
        assert (config.num_hidden_layers, config.num_attention_heads, config.hidden_size) == (
            preset.layers,
            preset.heads,
            preset.width,
        )
        with torch.device("meta"):
            model = own.model_class(config)
        assert 0.8 < sum(p.numel() for p in model.parameters()) / (12 * preset.layers * preset.width**2) < 1.2


def test_a_model_that_is_not_ours_has_no_family():
    with pytest.raises(
        ValueError, match=f"LlamaForCausalLM is not a relpos model; the families are {', '.join(FAMILIES)}"
    ):
        family_of(theirs("llama"))
    with pytest.raises(ValueError, match=r"unknown family 'lama'\. Did you mean 'llama'"):
        get_family("lama")
