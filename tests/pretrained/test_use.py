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
    SPARSE,
    WINDOW,
    assert_equal,
    assert_same,
    assert_same_generation,
    batch,
    generated,
    logits_and_gradients,
    small_model,
)
from torch import nn
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
from relpos.models import key_mask, named_attention
from relpos.models.attention_interface import HARMLESS, captured_calls, relpos_attention
from relpos.models.key_mask import KeyMask, KeyMaskTensor, interval_mask, key_mask_of, recognise
from relpos.models.named_attention import NAME, REPLACED
from relpos.pretrained.probe import probe_tokens
from relpos.pretrained.use import configs, unwrap

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32, "vocab_size": 64}
OTHER_SIZES = {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "d_model": 32, "ffn_dim": 32, "num_layers": 1}
SELECTING = [name for name in SPARSE if name != "recurrent_gemma"]  # its cache is tested below
UNCHECKED = r"not checked its model: call relpos\.use\(model\)"


def never(*args, **kwargs):
    raise AssertionError("a mask of queries × keys was materialised")


def attributes(model):
    return {name: set(vars(module)) for name, module in model.named_modules()}


@pytest.mark.parametrize("family", [*FAMILIES, *SELECTING])
def test_logits_and_all_gradients_equal_eager_and_off_restores_the_bits(family, monkeypatch):
    model = small_model(family)
    for side in ("right", "left"):
        inputs = batch(family, side)
        theirs = logits_and_gradients(model, inputs)
        assert relpos.use(model) is model
        with monkeypatch.context() as patch:
            if family in FAMILIES:
                patch.setattr(KeyMask, "materialise", never)
                patch.setattr(key_mask, "sdpa_mask", never)
            ours = logits_and_gradients(model, inputs)
        assert_same(ours, theirs)
        relpos.use(model, off=True)
        assert_equal(logits_and_gradients(model, inputs), theirs)


@pytest.mark.parametrize("family", [*DECODERS, *SEQ2SEQ, *SELECTING])
def test_generation_gives_the_same_tokens(family):
    model = small_model(family)
    side = "" if family == "minimax_m3_vl_text" else "left"  # as it says, padding on the left moves its blocks
    theirs = generated(model, family, side)
    assert_same_generation(generated(relpos.use(model), family, side), theirs)


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma2", "gpt_oss", "llama4_text", "t5", "bart", "bloom", "mpt"]
)
def test_static_caches_and_beams_give_the_same_tokens(family):
    model = small_model(family)
    for settings in ({"cache_implementation": "static"}, {"num_beams": 2}):
        relpos.use(model, off=True)
        theirs = generated(model, family, **settings)
        assert_same_generation(generated(relpos.use(model), family, **settings), theirs)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "mistral", "llama4_text"])
def test_several_tokens_are_added_to_a_cache_at_once(family):
    model = small_model(family)
    inputs = batch(family, "left")
    for cache in (None, StaticCache(config=model.config, max_cache_len=40)):
        logits = {}
        for off in (True, False):
            relpos.use(model, off=off)
            past, parts = cache, []
            if past is not None:
                past.reset()
            for part in (slice(0, 9), slice(9, 16), slice(16, LENGTH)):
                ids, mask = inputs["input_ids"][:, part], inputs["attention_mask"][:, : part.stop]
                out = model(input_ids=ids, attention_mask=mask, past_key_values=past, use_cache=True)
                past = out.past_key_values
                parts.append(out.logits)
            logits[off] = torch.cat(parts, dim=1)[inputs["attention_mask"].bool()]
        torch.testing.assert_close(logits[False], logits[True], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "bloom", "t5", "bert", "deberta"])
def test_gradient_checkpointing_gives_the_same_gradients(family, reentrant):
    model = small_model(family)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
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


@pytest.mark.parametrize("family", ["llama", "deberta", "deberta-v2"])
def test_dropout_acts_in_training_only_and_follows_the_seed(family):
    names = ("attention_dropout",) if family == "llama" else ("hidden_dropout_prob", "attention_probs_dropout_prob")
    model = relpos.use(small_model(family, **dict.fromkeys(names, 0.4)))
    rows = []
    for training, seed in ((True, 0), (True, 0), (True, 1), (False, 0), (False, 1)):
        torch.manual_seed(seed)
        rows.append(model.train(training)(**batch(family)).logits)
    assert [torch.equal(rows[0], row) for row in rows[1:4]] == [True, False, False]
    assert torch.equal(rows[3], rows[4])


@torch.no_grad()
def test_packed_sequences_equal_eager_and_do_not_see_each_other():
    model = small_model("llama")
    ids = batch("llama")["input_ids"][:1]
    packed = {"input_ids": ids, "position_ids": torch.cat([torch.arange(8), torch.arange(LENGTH - 8)])[None]}
    theirs = model(**packed, use_cache=False).logits
    relpos.use(model)
    ours = model(**packed, use_cache=False).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours[:, 8:], model(input_ids=ids[:, 8:]).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_of_the_users_own_is_served(additive):
    model = small_model("llama")
    ids = batch("llama")["input_ids"]
    seen = torch.rand(3, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    theirs = model(input_ids=ids, attention_mask=mask).logits
    ours = relpos.use(model)(input_ids=ids, attention_mask=mask if additive else seen).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    "family", ["gemma2", "bloom", "deberta-v2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "bert"))]
)
def test_torch_compile_makes_one_graph(family):
    model = small_model(family)
    inputs = batch(family)
    theirs = model(**inputs).logits
    ours = torch.compile(relpos.use(model), fullgraph=True, backend="aot_eager")(**inputs).logits
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours[real], theirs[real], rtol=1e-4, atol=1e-4)


def test_torch_compile_gives_gradients_without_padding():
    model = small_model("llama")
    inputs = {**batch("llama"), "attention_mask": None}
    gradients = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        relpos.use(model, off=run is model)
        model.zero_grad()
        run(**inputs).logits.square().mean().backward()
        gradients.append(model.model.embed_tokens.weight.grad.clone())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


def test_our_own_models_are_left_alone():
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["relpos_gpt2"](n_embd=32, n_layer=1, n_head=4))
    assert relpos.use(relpos.use(model), off=True) is model


class TestSelectedKeys:
    """Sparse attention: layers that pass the indices of the keys that a query may see."""

    def test_in_blocks_of_an_unknown_size_are_refused(self):
        layer = relpos.use(small_model("minimax_m3_vl_text")).model.layers[0].self_attn
        q, indices = torch.randn(1, 4, 8, 8), torch.zeros(1, 2, 8, 1, dtype=torch.long)
        relpos_attention(layer, q, q, q, None, block_indices=indices)
        del layer.indexer.block_size
        with pytest.raises(ValueError, match=r"finds no indexer\.block_size"):
            relpos_attention(layer, q, q, q, None, block_indices=indices)


def test_recurrent_gemma_generates_after_padding_on_the_left_as_without_a_cache():
    model = small_model("recurrent_gemma")
    theirs = generated(model, "recurrent_gemma", use_cache=False)  # with one, transformers masks all by the first token
    assert_same_generation(generated(relpos.use(model), "recurrent_gemma"), theirs)


class TestRefusals:
    @pytest.mark.parametrize("family", ["codegen", "xglm", "roformer", "xlnet"])
    def test_a_family_outside_the_interface_is_named_and_left_as_it_was(self, family):
        config = CONFIG_MAPPING[family](attention_heads=4, **SIZES, **OTHER_SIZES)
        model = AutoModel.from_config(config)
        before = [config._attn_implementation for config in configs(model)]
        with pytest.raises(ValueError, match=f"cannot run .* \\(model type '{family}'\\).*left as it was"):
            relpos.use(model)
        assert [config._attn_implementation for config in configs(model)] == before

    def test_a_layer_that_does_not_call_us_is_named_and_the_model_restored(self):
        class OwnAttention(nn.Module):
            def forward(self, hidden_states, **kwargs):
                return hidden_states, None

        model = small_model("llama")
        model.model.layers[1].self_attn = OwnAttention()
        before = attributes(model)
        with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn \(OwnAttention\) did not call us"):
            relpos.use(model)
        assert model.config._attn_implementation == "eager"
        assert attributes(model) == before

    @pytest.mark.parametrize(
        ("family", "wrong"),
        [
            ("llama", lambda module, q, *rest, **named: relpos_attention(module, 1.01 * q, *rest, **named)),
            ("deepseek_v32", lambda *given, **named: relpos_attention(*given, **{**named, "indices": None})),
            (
                "minimax_m3_vl_text",
                lambda *given, **named: relpos_attention(*given, **{**named, "block_indices": None}),
            ),
        ],
    )
    def test_a_layer_that_gives_other_numbers_on_ours_is_named_and_the_model_restored(self, family, wrong, monkeypatch):
        model = small_model(family)
        monkeypatch.setattr(named_attention, "relpos_attention", wrong)
        with pytest.raises(ValueError, match=r"the numbers of model\.layers\.0\.self_attn \(\w+Attention\) differ"):
            relpos.use(model)
        assert model.config._attn_implementation == "eager"

    @pytest.mark.parametrize(
        "family",
        ["bigbird_pegasus", "bloom", "deberta", "deberta-v2", "falcon", "gptj", "llama", "mpnet", "trocr", "xlnet"],
    )
    def test_no_model_is_built_with_the_name_of_a_replaced_attention(self, family):
        """Which the configuration of a used model has, if its attention is outside the interface."""
        relpos.use(small_model("llama"))
        config = CONFIG_MAPPING[family](**SIZES, **OTHER_SIZES)
        auto = AutoModelForCausalLM if family == "trocr" else AutoModel
        refused = pytest.raises(ValueError, match=f'attn_implementation="{REPLACED}"` is not supported')
        with torch.device("meta"), refused:
            auto.from_config(config, attn_implementation=REPLACED)

    def test_a_model_that_was_not_checked_is_told_to_be_on_its_first_call(self):
        used = relpos.use(small_model("llama"))
        copied = AutoModelForCausalLM.from_config(copy.deepcopy(used.config)).eval()
        with pytest.raises(ValueError, match=UNCHECKED):
            copied(**batch("llama"))
        copied.load_state_dict(used.state_dict())
        ours = relpos.use(copied)(**batch("llama")).logits
        torch.testing.assert_close(ours, used(**batch("llama")).logits)
        assert relpos.use(copied, off=True).config._attn_implementation == "sdpa"

    def test_a_keyword_that_nobody_knows_is_not_ignored(self):
        model = relpos.use(small_model("llama"))
        for name in HARMLESS:
            if name not in ("past_key_values", "labels", "return_dict", "logits_to_keep", "sliding_window"):
                model(**batch("llama"), **{name: None})
        with pytest.raises(ValueError, match="LlamaAttention gives attention favourite_keys, which relpos does not kn"):
            model(**batch("llama"), favourite_keys=torch.zeros(1))

    @pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5", "bloom", "deberta-v2"])
    def test_the_weights_cannot_be_asked_for(self, family):
        model = relpos.use(small_model(family))
        with pytest.raises(ValueError, match="never materialises the attention weights"):
            model(**batch(family), output_attentions=True)

    def test_what_holds_no_model_of_transformers_is_refused_or_told_the_attribute(self):
        reranker = nn.Module()
        reranker.encoder = small_model("bert")
        for thing, words in (
            (nn.Linear(2, 2), "not Linear"),
            ({}, r"not dict\.$"),
            (reranker, r"give its \.encoder\."),
        ):
            with pytest.raises(TypeError, match=words):
                relpos.use(thing)


@pytest.mark.parametrize(
    ("family", "settings", "least", "most"),
    [
        ("mistral", {}, WINDOW + WINDOW // 4, 64),
        ("mistral", {"sliding_window": 10**9, "max_position_embeddings": 10**6}, 15, 16),
        ("deepseek_v32", {"max_position_embeddings": 512, "index_topk": 200}, 200, 512),
        ("deepseek_v4", {}, 2 * 4, 64),
    ],
)
def test_the_probe_leaves_windows_chunks_and_selections_as_far_as_it_may_cost(family, settings, least, most):
    assert least < probe_tokens(small_model(family, **settings)) <= most


@pytest.mark.parametrize("family", ["llama", "t5", "bloom", "mpnet", "deberta", "deberta-v2"])
def test_off_leaves_no_trace_also_on_a_copy(family, tmp_path):
    model = small_model(family)
    before, hooks = attributes(model), len(model._forward_pre_hooks)
    relpos.use(relpos.use(model))
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(**batch(family)).logits, model(**batch(family)).logits)
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    for one in (twin, model):
        relpos.use(relpos.use(one, off=True), off=True)
        assert attributes(one) == before
        assert len(one._forward_pre_hooks) == hooks
        assert one.config._attn_implementation == "eager"
    assert model.state_dict().keys() == twin.state_dict().keys()


class Wrapper(nn.Module):
    """As peft's PeftModel, whose model is what get_base_model returns; as the first part of a SentenceTransformer."""

    def __init__(self, model, peft):
        super().__init__()
        self.auto_model = model
        if peft:
            self.get_base_model = lambda: model

    def forward(self, inputs=None, **named):
        return self.auto_model(**(inputs or named))


WRAPPERS = {
    "PeftModel": lambda model: Wrapper(model, peft=True),
    "DataParallel": nn.DataParallel,
    "PeftModel in DataParallel": lambda model: nn.DataParallel(Wrapper(model, peft=True)),
    "SentenceTransformer": lambda model: nn.Sequential(Wrapper(model, peft=False), nn.Identity()),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_model_inside_a_wrapper_is_switched_and_back(name):
    model, inputs = small_model("bert"), batch("bert")
    wrapper = WRAPPERS[name](model)
    theirs = model(**inputs).logits
    assert relpos.use(wrapper) is wrapper
    assert unwrap(wrapper) is model
    assert model.config._attn_implementation == NAME
    out = wrapper(inputs) if name == "SentenceTransformer" else wrapper(**inputs)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(out.logits[real], theirs[real], rtol=1e-4, atol=1e-4)
    assert relpos.use(wrapper, off=True) is wrapper
    assert model.config._attn_implementation == "eager"


IDS = torch.tensor([[0] * 4 + [1] * 7 + [2] * 5, [0] * 9 + [1] * 7])
BLOCKS = torch.tensor([[-1, 0, 0, 0] + [-1] * 4 + [1] * 4 + [-1] * 4] * 2)
CHUNKS = chunked_causal_mask_function(5, torch.tensor([0, 3]))
FUNCTIONS = {
    "causal": causal_mask_function,
    "bidirectional": bidirectional_mask_function,
    "window": sliding_window_causal_mask_function(WINDOW),
    "window of both directions": sliding_window_bidirectional_mask_function(3),
    "chunks": CHUNKS,
    "documents": and_masks(causal_mask_function, packed_sequence_mask_function(IDS)),
    "documents in a window": and_masks(sliding_window_causal_mask_function(3), packed_sequence_mask_function(IDS)),
    "documents in chunks": and_masks(CHUNKS, packed_sequence_mask_function(IDS)),
    "blocks": or_masks(causal_mask_function, blockwise_overlay(BLOCKS)),
}


class TestMasks:
    """Masks of transformers, described as intervals."""

    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("sizes", [(16, 16, 0, 0), (5, 16, 11, 0), (5, 16, 3, 0), (4, 9, 12, 7)])
    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_every_function_is_described_exactly(self, name, sizes, padded):
        mask = torch.ones(2, 16, dtype=torch.bool)
        mask[0, :3] = mask[1, 13:] = False
        arguments = dict(zip(("q_length", "kv_length", "q_offset", "kv_offset"), sizes, strict=True))
        arguments |= {"batch_size": 2, "mask_function": FUNCTIONS[name], "attention_mask": mask if padded else None}
        ours = interval_mask(**arguments, allow_is_causal_skip=False)
        assert isinstance(ours, KeyMaskTensor)
        theirs = sdpa_mask(**arguments, allow_is_causal_skip=False)
        assert ours.shape == theirs.shape
        assert torch.equal(ours & True, theirs)
        assert (recognise(FUNCTIONS[name]) is None) == (name == "blocks"), "transformers has renamed its mask functions"
        assert (ours.key_mask.mask is None) == (name != "blocks")

    def test_all_functions_of_transformers_are_known(self):
        named = {name for name in vars(masking_utils) if name.endswith(("_mask_function", "_overlay"))}
        known = {name.split(".")[0] for name in key_mask.KNOWN}
        known |= {"causal_mask_function", "bidirectional_mask_function", "chunked_causal_mask_function"}
        known |= {"sliding_window_causal_mask_function", "sliding_window_bidirectional_mask_function"}
        assert named - known == {"blockwise_overlay", "add_offsets_to_mask_function"}

    def test_a_function_that_nobody_knows_is_materialised_with_a_warning(self):
        def odd(batch_idx, head_idx, q_idx, kv_idx):
            return (q_idx + kv_idx) % 2 == 0

        arguments = {"batch_size": 1, "q_length": 4, "kv_length": 4}
        arguments["mask_function"] = or_masks(causal_mask_function, odd)
        with pytest.warns(UserWarning, match="memory of queries × keys"):
            ours = interval_mask(**arguments, use_vmap=True)
        assert key_mask_of(ours) is None
        assert torch.equal(ours, sdpa_mask(**arguments, allow_is_causal_skip=False))

    @pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "modernbert", "llama4_text"])
    def test_windows_and_chunks_reach_attention_as_intervals(self, family):
        model = relpos.use(small_model(family))
        calls = []
        with captured_calls(model, lambda *call: calls.append(call[-1])):
            model(**batch(family))
        if family == "llama4_text":
            assert any(call["documents"] is not None for call in calls)
        else:
            expected = (WINDOW // 2, WINDOW // 2) if family == "modernbert" else (WINDOW - 1, 0)
            assert any(call["window"] == expected for call in calls)

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
    def test_what_would_change_their_meaning_is_refused(self, convert):
        with pytest.raises(ValueError, match="would change the meaning"):
            convert(KeyMaskTensor(KeyMask(4, 4, batch=2, causal=True)))

    def test_they_can_be_sliced_joined_and_chosen_by(self):
        mask = KeyMaskTensor(KeyMask(4, 4, batch=2, causal=True))
        seen = torch.ones(4, 4).tril().bool().expand(2, 1, 4, 4)
        assert torch.equal(mask[:, 0, 1:], seen[:, 0, 1:])
        assert torch.equal(mask & ~mask[:, :, :1], seen & ~seen[:, :, :1])
        assert torch.equal(torch.cat([mask, mask], -1), torch.cat([seen, seen], -1))
        assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(seen, 0.0, -1.0))

    @torch.no_grad()
    def test_a_sliding_window_of_any_size_is_no_limit(self):
        model = small_model("mistral", sliding_window=None)
        ids = batch("mistral")["input_ids"][:1]
        expected = model(ids, use_cache=False).logits
        relpos.use(model)
        for window in (sys.maxsize, 2**31):
            model.config.sliding_window = window
            torch.testing.assert_close(model(ids, use_cache=False).logits, expected)
