"""Where position lives in transformers' models: compared with the queries, keys, tables and biases that they use."""

import copy
import re

import pytest
import torch
from senses_models import IMAGE, SWIN
from small_models import (
    EXPERTS,
    FAMILIES,
    GROUPED,
    LENGTH,
    LINEAR,
    SEQ2SEQ,
    SIZES,
    TOKENS,
    WINDOW,
    WINDOWED,
    batch,
    shaken,
    small_model,
)
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    Pop2PianoForConditionalGeneration,
    SiglipTextModel,
)
from transformers.masking_utils import eager_mask

import relpos
from relpos.models.attention_interface import captured_calls
from relpos.pretrained.families import rotary
from relpos.pretrained.layer_position import TABLES as TABLE_NAMES
from relpos.pretrained.layer_position import Rotary, model_layers
from relpos.pretrained.positions import facts, layer_numbers, layer_positions, summary

RECORDED = []


def recording(module, query, key, value, attention_mask=None, position_bias=None, **kwargs):
    """Attention that writes its arguments down and returns 0, so that no layer sees what another did with positions."""
    RECORDED.append({"layer": module, "q": query, "k": key, "mask": attention_mask, "bias": position_bias})
    return torch.zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register("recording", recording)
AttentionMaskInterface.register("recording", eager_mask)


@torch.no_grad()
def recorded(model, **inputs):
    """What each attention layer received in one forward."""
    RECORDED.clear()
    model(**inputs)
    calls = list(RECORDED)
    RECORDED.clear()
    assert calls
    return calls


def base_model(kind, implementation="eager", **settings):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**copy.deepcopy({**TOKENS, **settings}))
    make = SiglipTextModel._from_config if kind == "siglip_text_model" else AutoModel.from_config
    return shaken(make(config, attn_implementation=implementation)).eval()


def by_layer(model):
    """The positions of a model by layer."""
    return {model.get_submodule(position.name): position for position in layer_positions(model)}


def assert_close(ours, theirs, tolerance=1e-5):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * theirs.abs().max().item())


def ids_of(length):
    return torch.randint(4, 60, (1, length), generator=torch.Generator().manual_seed(0))


class TestRotations:
    """Compared with the model at position 0, where nothing turns."""

    ROTARY = [family for family in FAMILIES if family in rotary.ADAPTER.types - {"esm"}]
    MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}}
    SETTINGS = {  # of families that a small model of the others' sizes cannot be built of
        **{"qwen2_vl_text": MROPE, "qwen2_5_vl_text": MROPE, "qwen3_5_text": LINEAR, "qwen3_5_moe_text": LINEAR},
        "esm": {"position_embedding_type": "rotary", "mask_token_id": 3},
        "openai_privacy_filter": {"sliding_window": WINDOW},
        "phi3": {"sliding_window": WINDOW},
        "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    }
    SCALED = {
        "linear": {"factor": 4.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
        "llama3": {
            **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 16,
        },
        "dynamic": {"factor": 2.0},
        "longrope": {
            **{"factor": 4.0, "original_max_position_embeddings": 16},
            **{"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]},
        },
    }

    def check(self, model):
        """Compare a model's rotations with its own; return the kinds of its layers."""
        positions = torch.arange(LENGTH)
        still = recorded(model, input_ids=ids_of(LENGTH), position_ids=torch.zeros_like(positions)[None])
        turned = recorded(model, input_ids=ids_of(LENGTH), position_ids=positions[None])
        known = by_layer(model)
        for before, after in zip(still, turned, strict=True):
            layer = known[after["layer"]]
            for name in ("q", "k"):
                theirs = after[name]
                if layer.kind == "none":
                    assert_close(before[name], theirs)
                    continue
                projected = layer.rotary.undo(before[name], torch.zeros_like(positions))
                assert_close(layer.rotary.apply(projected, positions), theirs)
                assert_close(layer.rotary.undo(theirs, positions), projected)
                assert (before[name] - theirs).abs().max() > 0.1 * theirs.abs().max()  # it did turn
        return [known[call["layer"]].kind for call in turned]

    @pytest.mark.parametrize("family", ROTARY)
    def test_equal_what_reaches_attention(self, family):
        kinds = self.check(small_model(family, "recording"))
        assert set(kinds) == ({"rotary", "none"} if family in ("smollm3", "cohere2", "llama4_text") else {"rotary"})

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", sorted(rotary.ADAPTER.types - {"codegen", "gptj", *ROTARY}))
    def test_of_every_other_family_equal_what_reaches_attention(self, kind):
        self.check(base_model(kind, "recording", **{**GROUPED, **EXPERTS, **self.SETTINGS.get(kind, {})}))

    @pytest.mark.parametrize("kind", ["exaone4", "exaone_moe", "olmo3", "ministral"])
    def test_in_layers_with_and_without_windows(self, kind):
        kinds = self.check(base_model(kind, "recording", **{**GROUPED, **EXPERTS, **WINDOWED}))
        assert kinds == ["rotary", "none" if kind.startswith("exaone") else "rotary"]

    @pytest.mark.parametrize("scaling", SCALED)
    def test_that_are_scaled_equal_what_reaches_attention(self, scaling):
        parameters = {"rope_type": scaling, "rope_theta": 10_000.0, **self.SCALED[scaling]}
        for length in (12, 90):  # below and above the trained length
            model = base_model("llama", "recording", **{**GROUPED, "rope_parameters": parameters})
            known = layer_positions(model, length=length)[0]
            assert f"scaling {scaling}" in known.words
            assert known.rotary.scaling["rope_type"] == scaling
            call = recorded(model, input_ids=ids_of(length), position_ids=torch.arange(length)[None])[0]
            x = model.layers[0].input_layernorm(model.embed_tokens(ids_of(length)))
            q = model.layers[0].self_attn.q_proj(x).view(1, length, -1, 8).transpose(1, 2)
            assert_close(known.rotary.undo(call["q"], torch.arange(length)), q.detach())

    @pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
    def test_undone_give_the_projection_after_its_norm(self, family):
        model = small_model(family, "recording")
        seen = {}
        layer = model.model.layers[1].self_attn
        for name in ("q", "k"):
            source = getattr(layer, f"{name}_norm", None) or getattr(layer, f"{name}_proj")
            source.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out}))
        call = next(call for call in recorded(model, **batch(family)) if call["layer"] is layer)
        for name, out in seen.items():
            by_heads = out.unflatten(-1, (-1, 8)) if out.dim() == 3 else out
            projected = by_heads.transpose(1, 2) if by_heads.shape[1] == LENGTH else by_heads
            assert_close(by_layer(model)[layer].rotary.undo(call[name], torch.arange(LENGTH)), projected)

    @torch.no_grad()
    @pytest.mark.parametrize("family", ["codegen", "gptj"])
    def test_of_gpt_j_equal_its_own(self, family):
        model = base_model(family, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_positions=64)
        layer = model.h[0].attn
        seen = []
        theirs = layer._attn
        layer._attn = lambda query, key, *rest: (seen.append((query, key)), theirs(query, key, *rest))[1]
        for positions in (torch.zeros(9, dtype=torch.long), torch.arange(9)):
            model(ids_of(9), position_ids=positions[None])
        rotary = layer_positions(model)[0].rotary
        assert (rotary.layout, rotary.rotated, rotary.head_dim) == ("interleaved", 4, 8)
        for still, turned in zip(*seen, strict=True):
            assert_close(rotary.apply(still, torch.arange(9)), turned)

    @torch.no_grad()
    @pytest.mark.parametrize("family", ["falcon", "falcon grouped"])
    def test_of_falcon_equal_its_own(self, family):
        model = relpos.use(small_model(family))
        layer = model.transformer.h[0].self_attention
        projected, calls = [], []
        layer.query_key_value.register_forward_hook(lambda _, __, out: projected.append(out))
        with captured_calls(model, lambda *call: calls.append(call)):
            model(ids_of(9))
        rotary = layer_positions(model)[0].rotary
        for turned, theirs in zip(calls[0][1:3], layer._split_heads(projected[0]), strict=False):
            assert_close(rotary.undo(turned, torch.arange(9)), theirs.transpose(1, 2))


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "gemma2", "gemma3_text", "phi3", "gpt_oss", "cohere2", "modernbert"]
)
def test_windows_are_those_of_the_masks_and_part_of_the_words(family):
    model = small_model(family, "recording")
    sizes = {layer.module: layer.window for layer in model_layers(model)}
    for call in recorded(model, input_ids=batch(family)["input_ids"][:1]):
        middle, mask, size = LENGTH // 2, call["mask"], sizes[call["layer"]]
        row = torch.ones(LENGTH) if mask is None else (mask[0, 0, middle] == 0).float()
        both = family == "modernbert" and size is not None
        before = int(row[: middle + 1].sum())  # the query itself included
        assert before == (middle + 1 if size is None else size + both)
        assert not both or int(row[middle:].sum()) == size + 1
        assert ("window" in by_layer(model)[call["layer"]].words) == (size is not None)


GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
TABLES = {
    **dict.fromkeys(("gpt2", "opt", "biogpt", "bert", "roberta", "xlm-roberta", "electra", "distilbert")),
    **dict.fromkeys(("albert", "camembert", "esm", "mpnet", "bart", "marian", "pegasus", "m2m_100")),
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    **dict.fromkeys(("gpt_bigcode", "openai-gpt"), GPT2),
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 1, "attention_heads": 4, "max_position_embeddings": 64},
    **dict.fromkeys(("bert-generation", "data2vec-text", "ernie", "roberta-prelayernorm"), SIZES),
    **dict.fromkeys(("xlm-roberta-xl", "megatron-bert", "clip_text_model", "siglip_text_model"), SIZES),
    "convbert": {**SIZES, "embedding_size": 32, "head_ratio": 1},
    "xmod": {**SIZES, "default_language": "en_XX"},
    **dict.fromkeys(("blenderbot", "blenderbot-small", "mbart", "plbart", "nllb-moe"), SEQ2SEQ["bart"]),
}
FIRST_ROWS = {"roberta": 1, "m2m_100": 1, "opt": 2, "bart": 2, "xglm": 2}


class TestTables:
    @torch.no_grad()
    @pytest.mark.parametrize("family", TABLES)
    def test_are_what_is_added_to_the_embedding(self, family):
        model = small_model(family) if TABLES[family] is None else base_model(family, **TABLES[family])
        outputs = {}
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in TABLE_NAMES:
                module.register_forward_hook(lambda module, _, out: outputs.setdefault(module, out))
        inputs = {"input_ids": ids_of(11)}
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = inputs["input_ids"]
        model(**inputs)
        known = [layer for layer in model_layers(model) if not layer.cross]
        positions = {position.name: position for position in layer_positions(model)}
        for layer in known:
            own = next(out for module, out in outputs.items() if module in set(layer.part.modules()))
            assert torch.equal(positions[layer.name].table[:11], own.reshape(-1, own.shape[-1])[:11])
        first = positions[known[0].name]
        if family in FIRST_ROWS:
            assert f"the first token has row {FIRST_ROWS[family]}" in first.words
        sines = ("marian", "pegasus", "m2m_100", "nllb-moe", "xglm")
        assert first.kind == ("buckets" if family == "mpnet" else "sinusoidal" if family in sines else "learned")

    def test_of_marian_are_sines_then_cosines(self):
        model = AutoModel.from_config(CONFIG_MAPPING["marian"](**{**SEQ2SEQ["marian"], "d_model": 8, **TOKENS}))
        table = layer_positions(model)[0].table
        angle = torch.arange(len(table), dtype=torch.float64)[:, None] / 10_000 ** (torch.arange(0, 8, 2) / 8)
        torch.testing.assert_close(table.double(), torch.cat([angle.sin(), angle.cos()], dim=1), rtol=0, atol=1e-6)

    def test_of_whisper_are_sinusoids_in_its_encoder_and_learned_in_its_decoder(self):
        sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_source_positions": 20}
        model = base_model("whisper", **sizes, encoder_attention_heads=4, decoder_attention_heads=4)
        known = {position.name: position for position in layer_positions(model)}
        for stack, kind in (("encoder", "sinusoidal"), ("decoder", "learned")):
            layer = known[f"{stack}.layers.0.self_attn"]
            assert layer.kind == kind
            assert torch.equal(layer.table, model.get_submodule(stack).embed_positions.weight)
        assert known["decoder.layers.0.encoder_attn"].kind == "none"

    @torch.no_grad()
    @pytest.mark.parametrize("kind", ["vit", "deit", "dinov2", "clip_vision_model", "siglip_vision_model"])
    def test_of_images_are_added(self, kind):
        model = base_model(kind, **IMAGE)
        table = layer_positions(model)[0].table
        pixels = torch.randn(1, 3, 16, 16)
        before, added = model.embeddings(pixels), table.clone()
        table.zero_()  # it shares the memory of the parameter
        torch.testing.assert_close((before - model.embeddings(pixels))[0], added, rtol=0, atol=1e-5)


def toeplitz(values, queries, keys):
    """Values (heads, 2·length − 1) by distance as a bias (heads, queries, keys)."""
    distance = torch.arange(queries)[:, None] - torch.arange(keys)
    return values[:, distance + (values.shape[1] - 1) // 2]


class TestBiases:
    @pytest.mark.parametrize("used", [False, True])
    @pytest.mark.parametrize("family", ["t5", "mt5", "umt5", "switch_transformers"])
    def test_of_buckets_equal_what_reaches_attention(self, family, used):
        model = small_model(family, "recording")
        calls = recorded(model, **batch(family))
        if used:
            model.set_attn_implementation("eager")  # relpos.use compares with it
            relpos.use(model)
        known = by_layer(model)
        for call in calls:
            layer, bias = known[call["layer"]], call["bias"]
            if layer.kind == "none":
                assert not bias.any()
            else:
                assert_close(toeplitz(layer.bias(LENGTH), *bias.shape[2:]), bias[0])
        assert {known[call["layer"]].kind for call in calls} == {"buckets", "none"}
        tables = {float(layer.bias(3).sum()) for layer in known.values() if layer.kind == "buckets"}
        assert len(tables) == (4 if family == "umt5" else 2)

    @torch.no_grad()
    def test_of_buckets_of_longt5_mpnet_and_pop2piano_equal_their_own(self):
        model = small_model("longt5")
        layer = model.encoder.block[0].layer[0].LocalSelfAttention
        block = layer.block_len
        theirs = layer.compute_bias(block)[0, 0]  # (heads, block, 3·block): keys from the block before to the one after
        distance = torch.arange(block)[:, None] + block - torch.arange(3 * block)
        assert_close(by_layer(model)[layer].bias(2 * block)[:, distance + 2 * block - 1], theirs)
        model = small_model("mpnet")
        theirs = model.mpnet.encoder.compute_position_bias(torch.zeros(1, LENGTH, 32))[0]
        assert_close(toeplitz(layer_positions(model)[1].bias(LENGTH), LENGTH, LENGTH), theirs)
        model = Pop2PianoForConditionalGeneration(CONFIG_MAPPING["pop2piano"](**{**TOKENS, **SEQ2SEQ["t5"]}))
        for stack in (model.encoder, model.decoder):
            layer = stack.block[0].layer[0].SelfAttention
            theirs = layer.compute_bias(LENGTH, LENGTH)[0]
            assert_close(toeplitz(by_layer(model)[layer].bias(LENGTH), LENGTH, LENGTH), theirs)

    @torch.no_grad()
    @pytest.mark.parametrize("heads", [4, 6])  # 6: no power of two, for which each family has its own rule
    @pytest.mark.parametrize(
        ("family", "names"),
        [
            ("bloom", ("n_head", "hidden_size")),
            ("mpt", ("n_heads", "d_model")),
            ("falcon alibi", ("num_attention_heads", "hidden_size")),
        ],
    )
    def test_of_alibi_equal_what_their_layers_add(self, family, names, heads):
        model = small_model(family, **dict(zip(names, (heads, 48), strict=True)))
        position = layer_positions(model)[1]
        seen = []
        layer = model.get_submodule(position.name)
        layer.register_forward_pre_hook(lambda _, __, keywords: seen.append(keywords), with_kwargs=True)
        model(ids_of(LENGTH))
        if family == "bloom":
            theirs = seen[0]["alibi"].expand(-1, LENGTH, -1)  # (heads, queries, keys)
        elif family == "mpt":
            theirs = seen[0]["position_bias"][:, :, -LENGTH:].expand(-1, LENGTH, -1)
        else:
            theirs = seen[0]["attention_mask"][0]
        ours = toeplitz(position.bias(LENGTH), LENGTH, LENGTH)
        visible = torch.ones(LENGTH, LENGTH).tril().bool()
        theirs = theirs - theirs.diagonal(dim1=1, dim2=2)[:, :, None]  # a constant per query changes no weight
        assert ours.diagonal(dim1=1, dim2=2).abs().max() == 0
        tolerance = 0.01 if family == "falcon alibi" else 1e-6  # Falcon rounds to bfloat16
        assert_close(ours[:, visible], theirs[:, visible], tolerance)

    ROW, COLUMN = (axis.flatten() for axis in torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"))
    OFFSETS = (slice(None), ROW[:, None] - ROW + 3, COLUMN[:, None] - COLUMN + 3)

    @pytest.mark.parametrize(
        ("kind", "settings"),
        [
            ("swin", SWIN),
            ("swin", {**SWIN, "use_absolute_embeddings": True}),
            ("beit", {**IMAGE, "use_relative_position_bias": True}),
            ("beit", {**IMAGE, "use_shared_relative_position_bias": True}),
            ("beit", {**IMAGE, "use_relative_position_bias": True, "use_shared_relative_position_bias": True}),
        ],
    )
    def test_of_two_dimensional_tables_equal_what_reaches_attention(self, kind, settings):
        model = base_model(kind, "recording", **settings)
        known = by_layer(model)
        special = 0 if kind == "swin" else 1  # BEiT's class token
        calls = recorded(model, pixel_values=torch.randn(1, 3, settings["image_size"], settings["image_size"]))
        assert len(calls) == len(known)
        for call in calls:
            layer = known[call["layer"]]
            assert layer.kind == "table 2-D"
            assert ("learned positions" in layer.words) == ("use_absolute_embeddings" in settings)
            theirs = call["mask"][0, :, special:, special:]  # the first window, in which nothing is masked
            assert_close(layer.bias(4)[self.OFFSETS], theirs)
            assert torch.equal(layer.bias(2), layer.bias(4)[:, 2:5, 2:5])
        shared = kind == "beit" and "use_relative_position_bias" not in settings
        assert len({float(layer.bias(4).sum()) for layer in known.values()}) == (1 if shared else len(calls))

    @pytest.mark.parametrize("kind", ["donut-swin", "maskformer-swin"])
    def test_of_models_like_swin_equal_what_their_layers_look_up(self, kind):
        for layer, known in by_layer(base_model(kind, **SWIN)).items():
            theirs = layer.relative_position_bias_table[layer.relative_position_index.view(-1)].view(16, 16, -1)
            assert_close(known.bias(4)[self.OFFSETS], theirs.permute(2, 0, 1).detach())


@torch.no_grad()
@pytest.mark.parametrize("kind", ["deberta", "deberta-v2"])
def test_deberta_s_terms_are_those_that_its_output_depends_on(kind):
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}

    def order_matters(model):
        ids = torch.arange(4, 14)[None]
        forward, backward = (model(row).last_hidden_state for row in (ids, ids.flip(1)))
        return float((forward - backward.flip(1)).abs().max())

    for settings, expected in ((relative, "deberta"), ({}, "learned")):
        model = base_model(kind, **SIZES, **settings)
        layer = layer_positions(model)[0]
        assert layer.kind == expected
        assert ("content to position and position to content" in layer.words) == (expected == "deberta")
        assert order_matters(model) > 0.01
        table = model.encoder.rel_embeddings if expected == "deberta" else model.embeddings.position_embeddings
        table.weight.zero_()
        assert order_matters(model) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_alone_gives_the_same_words(family):
    model = small_model(family)
    lines = summary(model)
    assert lines == facts(model.config).positions
    assert ("does not know" in lines[0]) == (family == "inkling_text")


def test_an_unknown_family_says_so():
    layer = layer_positions(small_model("inkling_text"))[0]
    assert (layer.kind, layer.rotary, layer.table, layer.bias) == ("unknown", None, None, None)
    assert "'inkling_text'" in layer.words
    assert "attention weights can be drawn" in layer.words


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        (
            "smollm3",
            {},
            [
                "layers 1–36 but every 4th: RoPE, theta 2,000,000, all 128 dimensions, half layout$",
                r"every 4th layer: no position \(NoPE\)$",
            ],
        ),
        (
            "gemma3_text",
            {"sliding_window": 512},
            ["layers 1–26 but every 6th: RoPE, theta 10,000,.*window 512", "every 6th layer: RoPE, theta 1,000,000,"],
        ),
        (
            "gpt_oss",
            {},
            [".*scaling yarn × 32 from 4,096 tokens, cos and sin × 1.347.*window 128; a learned sink per head$", ""],
        ),
        ("relpos_llama", {"position": {"name": "alibi"}, "num_hidden_layers": 3}, ["layers 1–3: relpos alibi$"]),
    ],
)
def test_words(kind, settings, expected):
    lines = facts(CONFIG_MAPPING[kind](**settings)).positions
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.match(pattern, line)


@pytest.mark.parametrize(
    ("numbers", "total", "words"),
    [
        ([1], 1, "layer 1"),
        ([1, 2, 3], 3, "layers 1–3"),
        ([1, 2, 5], 6, "layers 1–2, 5"),
        ([4, 8, 12], 12, "every 4th layer"),
        ([1, 3, 5, 7], 8, "every 2nd layer from 1 on"),
        ([2, 3, 5, 6, 8], 8, "layers 1–8 but every 3rd from 1 on"),
        ([1, 2, 4, 5, 7, 11], 12, "layers 1–2, 4–5, 7, 11"),
    ],
)
def test_layer_numbers(numbers, total, words):
    assert layer_numbers(numbers, total) == words


def test_bad_input_gets_a_sentence():
    lying = CONFIG_MAPPING["bert"](**SIZES)
    lying.num_attention_heads = 5
    absurd = CONFIG_MAPPING["llama"](num_hidden_layers=10**9, hidden_size=32)
    rotary = Rotary(torch.ones(2), "half", 8)
    for call, sentence in (
        (lambda: layer_positions(torch.nn.Linear(2, 2)), "not from Linear"),
        (lambda: facts(absurd), "num_hidden_layers = 1,000,000,000"),
        (lambda: facts(lying), "no model can be built from this BertConfig"),
        (lambda: rotary.apply(torch.zeros(3, 6), torch.arange(3)), "have 8 dimensions, not 6"),
    ):
        with pytest.raises((TypeError, ValueError), match=sentence):
            call()
