"""relpos.use: transformers' models on our attention give the numbers, gradients and tokens that they gave before."""

import copy
import sys

import pytest
import torch
from small_models import (
    DECODERS,
    FAMILIES,
    LENGTH,
    SEQ2SEQ,
    WINDOW,
    batch,
    kind_of,
    logits_and_gradients,
    shaken,
    small_model,
)
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, StaticCache, masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

import relpos
from relpos.pretrained import attention_interface, key_mask, use
from relpos.pretrained.attention_interface import captured_calls, relpos_attention
from relpos.pretrained.key_mask import KeyMask, KeyMaskTensor, interval_mask, key_mask_of, recognise
from relpos.pretrained.probe import probe_tokens
from relpos.pretrained.use import NAME, configs, register

GENERATING = [*DECODERS, *SEQ2SEQ]


def assert_same(ours, theirs):
    """Logits and gradients that agree to float32's rounding."""
    (our_logits, our_gradients), (their_logits, their_gradients) = ours, theirs
    torch.testing.assert_close(our_logits, their_logits, rtol=0, atol=3e-5 * their_logits.abs().max().item())
    assert our_gradients.keys() == their_gradients.keys()
    largest = max(gradient.abs().max().item() for gradient in their_gradients.values())
    for name, gradient in their_gradients.items():  # some, as of the biases of keys, are 0 but for rounding
        scale = max(gradient.abs().max().item(), 0.01 * largest)
        error = (our_gradients[name] - gradient).abs().max().item()
        assert error <= 1e-4 * scale, f"gradient of {name}: off by {error}, largest {scale}"


def generated(model, family, **settings):
    """Tokens, and the logits of each step."""
    inputs = {name: x for name, x in batch(family, "left").items() if name != "decoder_input_ids"}
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, **settings}
    out = model.generate(**inputs, **settings, return_dict_in_generate=True, output_logits=True)
    return out.sequences, torch.stack(out.logits)


def assert_same_generation(ours, theirs):
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=3e-5 * theirs[1].abs().max().item())


def never(*args, **kwargs):
    raise AssertionError("a mask of queries × keys was materialised")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_all_gradients_equal_eager_and_off_restores_the_bits(family, monkeypatch):
    model = small_model(family)
    for side in ("right", "left"):
        inputs = batch(family, side)
        theirs = logits_and_gradients(model, inputs)
        assert relpos.use(model) is model
        with monkeypatch.context() as patch:
            patch.setattr(KeyMask, "materialise", never)
            patch.setattr(key_mask, "sdpa_mask", never)
            ours = logits_and_gradients(model, inputs)
        assert_same(ours, theirs)
        relpos.use(model, off=True)
        again = logits_and_gradients(model, inputs)
        assert torch.equal(again[0], theirs[0])
        assert all(torch.equal(again[1][name], gradient) for name, gradient in theirs[1].items())


@pytest.mark.parametrize("family", GENERATING)
def test_generation_gives_the_same_tokens(family):
    model = small_model(family)
    theirs = generated(model, family)
    assert_same_generation(generated(relpos.use(model), family), theirs)


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma2", "gpt_oss", "llama4_text", "t5", "bart", "bloom", "mpt"]
)
def test_static_caches_and_beams_give_the_same_tokens(family):
    model = small_model(family)
    for settings in ({"cache_implementation": "static"}, {"num_beams": 2}):
        relpos.use(model, off=True)
        theirs = generated(model, family, **settings)
        assert_same_generation(generated(relpos.use(model), family, **settings), theirs)


def test_several_tokens_are_added_to_a_cache_at_once():
    for family in ("llama", "mistral", "llama4_text"):
        model = small_model(family)
        inputs = batch(family, "left")
        for cache in (None, StaticCache(config=model.config, max_cache_len=40)):
            logits = {}
            for implementation in ("theirs", "ours"):
                relpos.use(model, off=implementation == "theirs")
                past = cache
                if past is not None:
                    past.reset()
                parts = []
                for part in (slice(0, 9), slice(9, 16), slice(16, LENGTH)):
                    ids, mask = inputs["input_ids"][:, part], inputs["attention_mask"][:, : part.stop]
                    with torch.no_grad():
                        out = model(input_ids=ids, attention_mask=mask, past_key_values=past, use_cache=True)
                    past = out.past_key_values
                    parts.append(out.logits)
                logits[implementation] = torch.cat(parts, dim=1)[inputs["attention_mask"].bool()]
            torch.testing.assert_close(logits["ours"], logits["theirs"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "bloom", "t5", "bert", "deberta"])
def test_gradient_checkpointing_gives_the_same_gradients(family, reentrant):
    model = small_model(family)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "hidden_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    model.train()
    theirs = logits_and_gradients(model, batch(family))
    relpos.use(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_same(logits_and_gradients(model, batch(family)), theirs)


def test_dropout_acts_in_training_only_and_follows_the_seed():
    model = relpos.use(small_model("llama", attention_dropout=0.5))
    inputs = batch("llama")
    rows = []
    for training, seed in ((True, 0), (True, 0), (True, 1), (False, 0), (False, 1)):
        torch.manual_seed(seed)
        rows.append(model.train(training)(**inputs).logits)
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], rows[3])
    assert torch.equal(rows[3], rows[4])


def test_packed_sequences_equal_eager_and_do_not_see_each_other():
    model = small_model("llama")
    ids = batch("llama")["input_ids"][:1]
    positions = torch.cat([torch.arange(8), torch.arange(LENGTH - 8)])[None]
    with torch.no_grad():
        theirs = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        relpos.use(model)
        ours = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = model(input_ids=ids[:, 8:]).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours[:, 8:], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_of_the_users_own_is_served(additive):
    model = small_model("llama")
    ids = batch("llama")["input_ids"]
    generator = torch.Generator().manual_seed(0)
    seen = torch.rand(3, 1, LENGTH, LENGTH, generator=generator) < 0.5
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        theirs = model(input_ids=ids, attention_mask=mask).logits
        ours = relpos.use(model)(input_ids=ids, attention_mask=mask if additive else seen).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "family", ["gemma2", "bloom", "deberta-v2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "bert"))]
)
def test_torch_compile_makes_one_graph(family):
    model = small_model(family)
    inputs = batch(family)
    with torch.no_grad():
        theirs = model(**inputs).logits
        compiled = torch.compile(relpos.use(model), fullgraph=True, backend="aot_eager")
        ours = compiled(**inputs).logits
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours[real], theirs[real], rtol=1e-4, atol=1e-4)


def test_torch_compile_gives_gradients_without_padding():
    model = small_model("llama")
    inputs = {**batch("llama"), "attention_mask": None}
    logits = {}
    for name in ("theirs", "ours"):
        model.zero_grad()
        run = model if name == "theirs" else torch.compile(relpos.use(model), fullgraph=True, backend="aot_eager")
        run(**inputs).logits.square().mean().backward()
        logits[name] = model.model.embed_tokens.weight.grad.clone()
    torch.testing.assert_close(logits["ours"], logits["theirs"], rtol=1e-4, atol=1e-6)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
IMAGE = {"image_size": 16, "patch_size": 4}
SOUND = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
SOUND = {**SOUND, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
BART = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
OTHERS = {  # models of images and sound: settings, and shapes of inputs
    "vit": ({**SMALL, **IMAGE}, {"pixel_values": (2, 3, 16, 16)}),
    "dinov2": ({**SMALL, **IMAGE}, {"pixel_values": (2, 3, 16, 16)}),
    "siglip_vision_model": ({**SMALL, **IMAGE}, {"pixel_values": (2, 3, 16, 16)}),
    "beit": ({**SMALL, **IMAGE, "use_relative_position_bias": True}, {"pixel_values": (2, 3, 16, 16)}),
    "swin": (SWIN, {"pixel_values": (2, 3, 32, 32)}),
    "wav2vec2": ({**SMALL, **SOUND}, {"input_values": (2, 900)}),
    "wav2vec2-conformer": ({**SMALL, **SOUND, "position_embeddings_type": "relative"}, {"input_values": (2, 900)}),
    "whisper": (
        {
            **BART,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "max_source_positions": 20,
            "num_mel_bins": 8,
        },
        {"input_features": (2, 8, 40)},
    ),
}


@pytest.mark.parametrize("family", OTHERS)
def test_models_of_images_and_sound_equal_eager(family):
    settings, shapes = OTHERS[family]
    torch.manual_seed(0)
    model = AutoModel.from_config(CONFIG_MAPPING[family](**settings), attn_implementation="eager")
    model = shaken(model).eval()
    inputs = {name: torch.randn(shape) for name, shape in shapes.items()}
    if family == "whisper":
        inputs["decoder_input_ids"] = torch.randint(4, 60, (2, 7))

    def run():
        model.zero_grad()
        out = model(**inputs).last_hidden_state
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    theirs = run()
    relpos.use(model)
    assert_same(run(), theirs)


def test_our_own_models_are_left_alone():
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["relpos_gpt2"](n_embd=32, n_layer=1, n_head=4))
    assert relpos.use(relpos.use(model), off=True) is model


# What is refused


@pytest.mark.parametrize("family", ["codegen", "xglm", "roformer"])
def test_a_family_outside_the_interface_is_refused_by_name_and_left_as_it_was(family):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    other = {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "d_model": 32, "ffn_dim": 32, "num_layers": 1}
    model = AutoModel.from_config(CONFIG_MAPPING[family](vocab_size=64, attention_heads=4, **sizes, **other))
    before = [config._attn_implementation for config in configs(model)]
    with pytest.raises(ValueError, match=f"cannot run .* \\(model type '{family}'\\).*left as it was"):
        relpos.use(model)
    assert [config._attn_implementation for config in configs(model)] == before


def test_a_layer_that_does_not_call_us_is_named_and_the_model_restored():
    class OwnAttention(torch.nn.Module):
        def forward(self, hidden_states, **kwargs):
            return hidden_states, None

    model = small_model("llama")
    model.model.layers[1].self_attn = OwnAttention()
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn \(OwnAttention\) did not call us"):
        relpos.use(model)
    assert model.config._attn_implementation == "eager"
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


@pytest.mark.parametrize("family", ["bloom", "deberta", "falcon", "llama"])
def test_no_model_is_built_with_relpos_by_name(family):
    register()
    with pytest.raises(ValueError, match=r"relpos.* is not supported"):
        small_model(family, implementation="relpos")


def test_a_model_that_was_not_checked_is_told_to_be_on_its_first_call():
    used = relpos.use(small_model("llama"))
    copied = AutoModelForCausalLM.from_config(copy.deepcopy(used.config)).eval()
    with pytest.raises(ValueError, match=r"not checked its model: call relpos\.use\(model\)"):
        copied(**batch("llama"))
    copied.load_state_dict(used.state_dict())
    ours = relpos.use(copied)(**batch("llama")).logits
    torch.testing.assert_close(ours, used(**batch("llama")).logits)
    assert relpos.use(copied, off=True).config._attn_implementation == "sdpa"


def test_a_keyword_that_nobody_knows_is_refused_and_not_ignored():
    model = relpos.use(small_model("llama"))
    for name in attention_interface.HARMLESS:
        if name not in ("past_key_values", "labels", "return_dict", "logits_to_keep", "sliding_window"):
            model(**batch("llama"), **{name: None})
    with pytest.raises(ValueError, match="LlamaAttention gives attention favourite_keys, which relpos does not know"):
        model(**batch("llama"), favourite_keys=torch.zeros(1))


def test_a_layer_that_gives_other_numbers_on_ours_is_named_and_the_model_restored(monkeypatch):
    model = small_model("llama")

    def shifted(module, query, *rest, **keywords):
        return relpos_attention(module, query * 1.01, *rest, **keywords)

    monkeypatch.setattr(use, "relpos_attention", shifted)
    with pytest.raises(ValueError, match=r"the numbers of model\.layers\.0\.self_attn \(LlamaAttention\) differ by"):
        relpos.use(model)
    assert model.config._attn_implementation == "eager"


def test_the_probe_leaves_windows_chunks_and_selections_as_far_as_it_may_cost():
    assert probe_tokens(small_model("mistral")) > WINDOW + WINDOW // 4
    assert probe_tokens(small_model("mistral", sliding_window=10**9, max_position_embeddings=10**6)) == 16


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.float(),
        lambda x: x + torch.zeros(2, 1, 4, 4),
        lambda x: x * -1e9,
        lambda x: x.masked_fill(torch.eye(4, dtype=torch.bool), -torch.inf),
        lambda x: torch.cat([x, torch.zeros(2, 1, 4, 3, dtype=torch.bool)], -1),
    ],
)
def test_a_mask_refuses_what_would_change_its_meaning(convert):
    mask = KeyMaskTensor(KeyMask(4, 4, batch=2, causal=True))
    with pytest.raises(ValueError, match="would change the meaning"):
        convert(mask)


def test_a_mask_can_be_sliced_joined_and_chosen_by():
    mask = KeyMaskTensor(KeyMask(4, 4, batch=2, causal=True))
    seen = torch.ones(4, 4).tril().bool().expand(2, 1, 4, 4)
    assert torch.equal(mask[:, 0, 1:], seen[:, 0, 1:])
    assert torch.equal(mask & ~mask[:, :, :1], seen & ~seen[:, :, :1])
    assert torch.equal(torch.cat([mask, mask], -1), torch.cat([seen, seen], -1))
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(seen, 0.0, -1.0))


def test_what_is_no_model_of_transformers_is_refused():
    with pytest.raises(TypeError, match="not Linear"):
        relpos.use(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5", "bloom", "deberta-v2"])
def test_asking_for_weights_is_refused_with_a_sentence(family):
    model = relpos.use(small_model(family))
    with pytest.raises(ValueError, match="never materialises the attention weights"):
        model(**batch(family), output_attentions=True)


@pytest.mark.parametrize("family", ["llama", "t5", "bloom", "mpnet", "deberta", "deberta-v2"])
def test_off_leaves_no_trace_also_on_a_copy(family, tmp_path):
    model = small_model(family)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    hooks = len(model._forward_pre_hooks)
    relpos.use(relpos.use(model))
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(**batch(family)).logits, model(**batch(family)).logits)
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    for one in (twin, model):
        relpos.use(relpos.use(one, off=True), off=True)
        assert {name: set(vars(module)) for name, module in one.named_modules()} == before
        assert len(one._forward_pre_hooks) == hooks
        assert one.config._attn_implementation == "eager"
    assert model.state_dict().keys() == twin.state_dict().keys()


# Masks as intervals


IDS = torch.tensor([[0] * 4 + [1] * 7 + [2] * 5, [0] * 9 + [1] * 7])
BLOCKS = torch.tensor([[-1, 0, 0, 0] + [-1] * 4 + [1] * 4 + [-1] * 4] * 2)
FUNCTIONS = {
    "causal": causal_mask_function,
    "bidirectional": bidirectional_mask_function,
    "window": sliding_window_causal_mask_function(WINDOW),
    "window of both directions": sliding_window_bidirectional_mask_function(3),
    "chunks": chunked_causal_mask_function(5, torch.tensor([0, 3])),
    "documents": and_masks(causal_mask_function, packed_sequence_mask_function(IDS)),
    "documents in a window": and_masks(sliding_window_causal_mask_function(3), packed_sequence_mask_function(IDS)),
    "documents in chunks": and_masks(
        chunked_causal_mask_function(5, torch.tensor([0, 3])), packed_sequence_mask_function(IDS)
    ),
    "blocks": or_masks(causal_mask_function, blockwise_overlay(BLOCKS)),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sizes", [(16, 16, 0, 0), (5, 16, 11, 0), (5, 16, 3, 0), (4, 9, 12, 7)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mask_function_is_described_exactly(name, sizes, padded):
    queries, keys, first_query, first_key = sizes
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[0, :3] = mask[1, 13:] = False
    arguments = {
        "batch_size": 2,
        "q_length": queries,
        "kv_length": keys,
        "q_offset": first_query,
        "kv_offset": first_key,
        "mask_function": FUNCTIONS[name],
        "attention_mask": mask if padded else None,
        "allow_is_causal_skip": False,
    }
    ours = interval_mask(**arguments)
    assert isinstance(ours, KeyMaskTensor)
    theirs = sdpa_mask(**arguments)
    assert ours.shape == theirs.shape
    assert torch.equal(ours & True, theirs)
    parts = recognise(FUNCTIONS[name])
    assert (parts is None) == (name == "blocks"), "transformers has renamed its mask functions"
    assert (ours.key_mask.mask is None) == (name != "blocks")


def test_all_of_transformers_mask_functions_are_known():
    named = {name for name in vars(masking_utils) if name.endswith(("_mask_function", "_overlay"))}
    known = {name.split(".")[0] for name in key_mask.KNOWN} | {
        "causal_mask_function",
        "bidirectional_mask_function",
    }
    composed = {
        "sliding_window_causal_mask_function",
        "sliding_window_bidirectional_mask_function",
        "chunked_causal_mask_function",
    }
    assert named - known - composed == {"blockwise_overlay", "add_offsets_to_mask_function"}


def test_a_function_that_nobody_knows_is_materialised_with_a_warning():
    def odd(batch_idx, head_idx, q_idx, kv_idx):
        return (q_idx + kv_idx) % 2 == 0

    arguments = {"batch_size": 1, "q_length": 4, "kv_length": 4, "mask_function": or_masks(causal_mask_function, odd)}
    with pytest.warns(UserWarning, match="memory of queries × keys"):
        ours = interval_mask(**arguments, use_vmap=True)
    assert key_mask_of(ours) is None
    assert torch.equal(ours, sdpa_mask(**arguments, allow_is_causal_skip=False))


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "modernbert", "llama4_text"])
def test_windows_and_chunks_reach_attention_as_intervals(family):
    model = relpos.use(small_model(family))
    calls = []
    with captured_calls(model, lambda *call: calls.append(call[-1])):
        model(**batch(family))
    if family == "llama4_text":
        assert any(call["documents"] is not None for call in calls)
    else:
        expected = (WINDOW // 2, WINDOW // 2) if family == "modernbert" else (WINDOW - 1, 0)
        assert any(call["window"] == expected for call in calls)


def test_every_generating_family_has_padding_on_the_left_in_its_test():
    assert all(kind_of(family) != "encoder" for family in GENERATING)
    assert batch("llama", "left")["attention_mask"][2, 0] == 0


@torch.no_grad()
def test_a_sliding_window_of_any_size_is_no_limit():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = CONFIG_MAPPING["mistral"](vocab_size=50, num_key_value_heads=2, sliding_window=None, **sizes)
    model = AutoModel.from_config(config).eval()
    ids = torch.randint(0, 50, (1, 20))
    expected = model(ids, use_cache=False).last_hidden_state
    relpos.use(model)
    for window in (sys.maxsize, 2**31):
        model.config.sliding_window = window
        torch.testing.assert_close(model(ids, use_cache=False).last_hidden_state, expected)
