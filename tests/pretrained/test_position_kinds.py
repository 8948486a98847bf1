"""Where position lives in transformers' models: compared with the queries, keys, tables and biases that they use."""

import copy
from contextlib import contextmanager

import pytest
import torch
from small_models import EXPERTS, FAMILIES, GROUPED, LENGTH, SEQ2SEQ, SIZES, TOKENS, WINDOW, batch, shaken, small_model
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
from relpos.pretrained.families import alibi_models, rotary
from relpos.pretrained.layer_position import Rotary, model_layers
from relpos.pretrained.positions import facts, layer_numbers, layer_positions, summary

RECORDED = []


def recording(module, query, key, value, attention_mask=None, position_bias=None, **kwargs):
    """Attention that writes its arguments down and returns 0, so that no layer sees what another did with positions."""
    RECORDED.append({"layer": module, "q": query, "k": key, "mask": attention_mask, "bias": position_bias})
    return torch.zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register("recording", recording)
AttentionMaskInterface.register("recording", eager_mask)


def recorded(model, **inputs):
    """What each attention layer received in one forward."""
    RECORDED.clear()
    with torch.no_grad():
        model(**inputs)
    calls = list(RECORDED)
    RECORDED.clear()
    assert calls
    return calls


def base_model(kind, implementation="eager", **settings):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**TOKENS, **settings})
    return shaken(AutoModel.from_config(config, attn_implementation=implementation)).eval()


def by_layer(model, **arguments):
    """The positions of a model by layer."""
    return {model.get_submodule(each.name): each for each in layer_positions(model, **arguments)}


def assert_close(ours, theirs, tolerance=1e-5):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * theirs.abs().max().item())


ROTARY = [family for family in FAMILIES if family in {*rotary.ADAPTER.types, "falcon", "falcon grouped"} - {"esm"}]
ROTARY_BY_POSITION_IDS = [family for family in ROTARY if not family.startswith("falcon")]
OTHERS = {
    "codegen": ({"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "n_positions": 64}),
    "gptj": ({"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "n_positions": 64}),
}


def assert_rotation_is_theirs(model, positions, **arguments):
    """Compare with the model at position 0, where nothing turns; return the kinds of its layers."""
    ids = torch.randint(4, 60, (1, len(positions)), generator=torch.Generator().manual_seed(0))
    still = recorded(model, input_ids=ids, position_ids=torch.zeros_like(positions)[None])
    turned = recorded(model, input_ids=ids, position_ids=positions[None])
    known = by_layer(model, **arguments)
    for before, after in zip(still, turned, strict=True):
        layer = known[after["layer"]]
        for name in ("q", "k"):
            theirs = after[name]
            if layer.kind == "none":
                assert_close(before[name], theirs)
                continue
            rotary = layer.rotary
            projected = rotary.undo(before[name], torch.zeros_like(positions))
            assert_close(rotary.apply(projected, positions), theirs)
            assert_close(rotary.undo(theirs, positions), projected)
            assert (before[name] - theirs).abs().max() > 0.1 * theirs.abs().max()  # it did turn
    return [known[call["layer"]].kind for call in turned]


@pytest.mark.parametrize("family", ROTARY_BY_POSITION_IDS)
def test_rotation_equals_what_reaches_attention(family):
    kinds = assert_rotation_is_theirs(small_model(family, "recording"), torch.arange(LENGTH))
    assert set(kinds) == ({"rotary", "none"} if family in ("smollm3", "cohere2", "llama4_text") else {"rotary"})


SETTINGS = {  # of families that a small model of the others' sizes cannot be built of
    "qwen2_vl_text": {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}},
    "esm": {"position_embedding_type": "rotary", "mask_token_id": 3},
    "openai_privacy_filter": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR = {**LINEAR, "layer_types": ["linear_attention", "full_attention"]}
SETTINGS["qwen2_5_vl_text"] = SETTINGS["qwen2_vl_text"]
SETTINGS["qwen3_5_text"] = SETTINGS["qwen3_5_moe_text"] = LINEAR


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(rotary.ADAPTER.types - {"codegen", "gptj", *ROTARY}))
def test_rotation_of_every_other_family_equals_what_reaches_attention(kind):
    settings = copy.deepcopy({**GROUPED, **EXPERTS, **SETTINGS.get(kind, {})})
    assert_rotation_is_theirs(base_model(kind, "recording", **settings), torch.arange(LENGTH))


ALTERNATING = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize("kind", ["exaone4", "exaone_moe", "olmo3", "ministral"])
def test_rotation_in_layers_with_and_without_windows(kind):
    settings = {**GROUPED, **EXPERTS, "sliding_window": WINDOW, "layer_types": ALTERNATING}
    kinds = assert_rotation_is_theirs(base_model(kind, "recording", **settings), torch.arange(LENGTH))
    assert kinds == ["rotary", "none" if kind.startswith("exaone") else "rotary"]


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


@pytest.mark.parametrize("scaling", SCALED)
def test_scaled_rotation_equals_what_reaches_attention(scaling):
    parameters = {"rope_type": scaling, "rope_theta": 10_000.0, **SCALED[scaling]}
    for length in (12, 90):  # below and above the trained length
        model = base_model("llama", "recording", **{**GROUPED, "rope_parameters": dict(parameters)})
        layer_positions(model)
        positions = torch.arange(length)
        known = layer_positions(model, length=length)
        assert f"scaling {scaling}" in known[0].words
        assert known[0].rotary.scaling["rope_type"] == scaling
        ids = torch.randint(4, 60, (1, length))
        call = recorded(model, input_ids=ids, position_ids=positions[None])[0]
        project = model.layers[0].self_attn
        x = model.layers[0].input_layernorm(model.embed_tokens(ids))
        q = project.q_proj(x).view(1, length, -1, 8).transpose(1, 2)
        assert_close(known[0].rotary.undo(call["q"], positions), q.detach())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_undo_gives_the_projection_after_its_norm(family):
    model = small_model(family, "recording")
    seen = {}
    layer = model.model.layers[1].self_attn
    for name in ("q", "k"):
        source = getattr(layer, f"{name}_norm", None) or getattr(layer, f"{name}_proj")
        source.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out}))
    calls = recorded(model, **batch(family))
    call = next(call for call in calls if call["layer"] is layer)
    rotary = by_layer(model)[layer].rotary
    for name in ("q", "k"):
        projected = seen[name]
        if projected.dim() == 3:
            projected = projected.unflatten(-1, (-1, 8)).transpose(1, 2)
        if projected.shape[1] == LENGTH:
            projected = projected.transpose(1, 2)
        assert_close(rotary.undo(call[name], torch.arange(LENGTH)), projected)


@pytest.mark.parametrize("family", OTHERS)
def test_rotation_of_gpt_j_equals_its_own(family):
    model = base_model(family, **OTHERS[family])
    layer = model.h[0].attn
    seen = []
    theirs = layer._attn
    layer._attn = lambda query, key, *rest: (seen.append((query, key)), theirs(query, key, *rest))[1]
    ids = torch.randint(4, 60, (1, 9))
    for positions in (torch.zeros(9, dtype=torch.long), torch.arange(9)):
        with torch.no_grad():
            model(ids, position_ids=positions[None])
    rotary = layer_positions(model)[0].rotary
    assert (rotary.layout, rotary.rotated, rotary.head_dim) == ("interleaved", 4, 8)
    for still, turned in zip(*seen, strict=True):
        assert_close(rotary.apply(still, torch.arange(9)), turned)


def test_rotation_of_falcon_equals_its_own(monkeypatch):
    seen = []
    theirs = alibi_models.relpos_attention

    def listen(module, query, key, *rest, **named):
        seen.append((module.query_key_value, query, key))
        return theirs(module, query, key, *rest, **named)

    model = relpos.use(small_model("falcon"))
    monkeypatch.setattr(alibi_models, "relpos_attention", listen)
    projected = []
    first = model.transformer.h[0].self_attention
    first.query_key_value.register_forward_hook(lambda _, __, out: projected.append(out))
    with torch.no_grad():
        model(torch.randint(4, 60, (1, 9)))
    query, key, _ = first._split_heads(projected[0])
    rotary = layer_positions(model)[0].rotary
    assert_close(rotary.undo(seen[0][1], torch.arange(9)), query.transpose(1, 2))
    assert_close(rotary.undo(seen[0][2], torch.arange(9)), key.transpose(1, 2))


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "gemma2", "gemma3_text", "phi3", "gpt_oss", "cohere2", "modernbert"]
)
def test_windows_are_those_of_the_masks(family):
    model = small_model(family, "recording")
    ids = batch(family)["input_ids"][:1]
    sizes = {layer.module: layer.window for layer in model_layers(model)}
    for call in recorded(model, input_ids=ids):
        middle = LENGTH // 2
        mask = call["mask"]
        row = torch.ones(LENGTH) if mask is None else (mask[0, 0, middle] == 0).float()
        before = int(row[: middle + 1].sum())  # the query itself included
        size = sizes[call["layer"]]
        if size is None:
            assert before == middle + 1
        elif family == "modernbert":
            assert before == size + 1
            assert int(row[middle:].sum()) == size + 1
        else:
            assert before == size


TABLES = {
    **dict.fromkeys(("gpt2", "opt", "biogpt", "bert", "roberta", "xlm-roberta", "electra", "distilbert")),
    **dict.fromkeys(("albert", "camembert", "esm", "mpnet", "bart", "marian", "pegasus", "m2m_100")),
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 1, "attention_heads": 4, "max_position_embeddings": 64},
    "xlm-roberta-xl": SIZES,
    "megatron-bert": SIZES,
    "clip_text_model": SIZES,
    **dict.fromkeys(("bert-generation", "data2vec-text", "ernie", "roberta-prelayernorm"), SIZES),
    "convbert": {**SIZES, "embedding_size": 32, "head_ratio": 1},
    "xmod": {**SIZES, "default_language": "en_XX"},
    "openai-gpt": {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64},
    **dict.fromkeys(("blenderbot", "blenderbot-small", "mbart", "plbart", "nllb-moe"), SEQ2SEQ["bart"]),
}


def hear(modules):
    """What each module returns first, from now on."""
    outputs = {}
    for module in modules:
        module.register_forward_hook(lambda module, _, out: outputs.setdefault(module, out))
    return outputs


@pytest.mark.parametrize("family", TABLES)
def test_tables_are_what_is_added_to_the_embedding(family):
    model = small_model(family) if TABLES[family] is None else base_model(family, **TABLES[family])
    names = ("position_embeddings", "position_embedding", "embed_positions", "wpe", "positions_embed")
    outputs = hear(module for name, module in model.named_modules() if name.rpartition(".")[2] in names)
    inputs = {"input_ids": torch.randint(4, 60, (1, 11))}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        model(**inputs)
    assert outputs
    known = [each for each in layer_positions(model) if each.kind != "none"]
    for layer in known:
        stack = max((name for name in model_names(model) if layer.name.startswith(name)), key=len)
        own = [out for module, out in outputs.items() if module in set(model.get_submodule(stack).modules())]
        assert torch.equal(layer.table[:11], own[0].reshape(-1, own[0].shape[-1])[:11])
    if family in ("roberta", "opt", "bart", "m2m_100", "xglm"):
        row = 1 if family in ("roberta", "m2m_100") else 2
        assert f"the first token has row {row}" in known[0].words
    sines = ("marian", "pegasus", "m2m_100", "nllb-moe", "xglm")
    assert {each.kind for each in known} == {
        "buckets" if family == "mpnet" else "sinusoidal" if family in sines else "learned"
    }


def model_names(model):
    return [name for name, module in model.named_modules() if hasattr(module, "_can_set_attn_implementation")]


def test_marian_s_table_is_sines_then_cosines():
    model = AutoModel.from_config(CONFIG_MAPPING["marian"](**{**SEQ2SEQ["marian"], "d_model": 8, **TOKENS}))
    table = layer_positions(model)[0].table
    angle = torch.arange(len(table), dtype=torch.float64)[:, None] / 10_000 ** (torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(table.double(), torch.cat([angle.sin(), angle.cos()], dim=1), rtol=0, atol=1e-6)


def test_whisper_adds_sinusoids_in_its_encoder_and_learned_rows_in_its_decoder():
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_source_positions": 20}
    model = base_model("whisper", **sizes, encoder_attention_heads=4, decoder_attention_heads=4)
    kinds = {each.name: each for each in layer_positions(model)}
    encoder, decoder = kinds["encoder.layers.0.self_attn"], kinds["decoder.layers.0.self_attn"]
    assert (encoder.kind, decoder.kind) == ("sinusoidal", "learned")
    assert kinds["decoder.layers.0.encoder_attn"].kind == "none"
    assert torch.equal(encoder.table, model.encoder.embed_positions.weight)
    assert torch.equal(decoder.table, model.decoder.embed_positions.weight)


def test_siglip_s_text_has_a_table():
    model = SiglipTextModel(CONFIG_MAPPING["siglip_text_model"](**SIZES))
    table = layer_positions(model)[0].table
    assert torch.equal(table, model.get_submodule("embeddings.position_embedding").weight)


@pytest.mark.parametrize("kind", ["vit", "deit", "dinov2", "clip_vision_model", "siglip_vision_model"])
def test_images_have_their_table_added(kind):
    model = base_model(kind, **{**SIZES, "image_size": 16, "patch_size": 4})
    table = layer_positions(model)[0].table
    with torch.no_grad():
        pixels = torch.randn(1, 3, 16, 16)
        before = model.embeddings(pixels)
        added = table.clone()
        table.zero_()  # it shares the memory of the parameter
        after = model.embeddings(pixels)
    torch.testing.assert_close((before - after)[0], added, rtol=0, atol=1e-5)


def toeplitz(values, queries, keys):
    """Values (heads, 2·length − 1) by distance as a bias (heads, queries, keys)."""
    length = (values.shape[1] + 1) // 2
    distance = torch.arange(queries)[:, None] - torch.arange(keys)
    return values[:, distance + length - 1]


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("family", ["t5", "mt5", "umt5", "switch_transformers"])
def test_buckets_equal_the_bias_that_reaches_attention(family, used):
    model = small_model(family, "recording")
    calls = recorded(model, **batch(family))
    if used:
        model.set_attn_implementation("eager")  # relpos.use compares with it
        relpos.use(model)
    known = by_layer(model)
    seen = set()
    for call in calls:
        layer, bias = known[call["layer"]], call["bias"]
        seen.add(layer.kind)
        if layer.kind == "none":
            assert not bias.any()
            continue
        queries, keys = bias.shape[2:]
        assert_close(toeplitz(layer.bias(LENGTH), queries, keys), bias[0])
    assert seen == {"buckets", "none"}
    tables = {float(each.bias(3).sum()) for each in known.values() if each.kind == "buckets"}
    assert len(tables) == (4 if family == "umt5" else 2)


def test_buckets_of_longt5_mpnet_and_pop2piano_equal_their_own():
    model = small_model("longt5")
    layer = model.encoder.block[0].layer[0].LocalSelfAttention
    block = layer.block_len
    theirs = layer.compute_bias(block)[0, 0]  # (heads, block, 3·block): keys from the block before to the one after
    ours = by_layer(model)[layer].bias(2 * block)
    distance = torch.arange(block)[:, None] + block - torch.arange(3 * block)
    assert_close(ours[:, distance + 2 * block - 1], theirs.detach())
    model = small_model("mpnet")
    theirs = model.mpnet.encoder.compute_position_bias(torch.zeros(1, LENGTH, 32))[0].detach()
    assert_close(toeplitz(layer_positions(model)[1].bias(LENGTH), LENGTH, LENGTH), theirs)
    model = Pop2PianoForConditionalGeneration(CONFIG_MAPPING["pop2piano"](**{**TOKENS, **SEQ2SEQ["t5"]}))
    for stack in (model.encoder, model.decoder):
        layer = stack.block[0].layer[0].SelfAttention
        theirs = layer.compute_bias(LENGTH, LENGTH)[0].detach()
        assert_close(toeplitz(by_layer(model)[layer].bias(LENGTH), LENGTH, LENGTH), theirs)


@contextmanager
def keywords_of(module):
    """The keyword arguments of a module's next calls."""
    seen = []
    hook = module.register_forward_pre_hook(lambda _, __, keywords: seen.append(keywords), with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon alibi"])
@pytest.mark.parametrize("heads", [4, 6])  # 6: no power of two, for which each family has its own rule
def test_alibi_equals_the_bias_that_their_layers_add(family, heads):
    sizes = {"n_head": heads, "n_heads": heads, "num_attention_heads": heads, "hidden_size": 48, "d_model": 48}
    allowed = {"bloom": ("n_head", "hidden_size"), "mpt": ("n_heads", "d_model")}
    names = allowed.get(family, ("num_attention_heads", "hidden_size"))
    model = small_model(family, **{name: sizes[name] for name in names})
    position = layer_positions(model)[1]
    layer = model.get_submodule(position.name)
    with keywords_of(layer) as seen, torch.no_grad():
        model(torch.randint(4, 60, (1, LENGTH)))
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


SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
BEIT = {**SIZES, "image_size": 16, "patch_size": 4}
FLAT = {  # model type, settings
    "swin": ("swin", SWIN),
    "swin with positions": ("swin", {**SWIN, "use_absolute_embeddings": True}),
    "beit": ("beit", {**BEIT, "use_relative_position_bias": True}),
    "beit shared": ("beit", {**BEIT, "use_shared_relative_position_bias": True}),
    "beit both": ("beit", {**BEIT, "use_relative_position_bias": True, "use_shared_relative_position_bias": True}),
}


@pytest.mark.parametrize("name", FLAT)
def test_two_dimensional_tables_equal_the_bias_that_reaches_attention(name):
    kind, settings = FLAT[name]
    model = base_model(kind, "recording", **settings)
    known = by_layer(model)
    special = 0 if "swin" in kind else 1  # BEiT's class token
    size = settings["image_size"]
    calls = recorded(model, pixel_values=torch.randn(1, 3, size, size))
    assert len(calls) == len(known)
    row, column = (axis.flatten() for axis in torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"))
    down, across = row[:, None] - row + 3, column[:, None] - column + 3
    values = set()
    for call in calls:
        layer = known[call["layer"]]
        assert layer.kind == "table 2-D"
        ours = layer.bias(4)
        values.add(float(ours.sum()))
        theirs = call["mask"][0, :, special:, special:]  # the first window, in which nothing is masked
        assert_close(ours[:, down, across], theirs)
        assert torch.equal(layer.bias(2), ours[:, 2:5, 2:5])
    assert len(values) == (1 if name == "beit shared" else len(calls))
    assert ("learned positions" in layer.words) == (name == "swin with positions")


@pytest.mark.parametrize("kind", ["donut-swin", "maskformer-swin"])
def test_two_dimensional_tables_of_swin_s_kin_equal_what_their_layers_look_up(kind):
    model = base_model(kind, **SWIN)
    row, column = (axis.flatten() for axis in torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"))
    for layer, known in by_layer(model).items():
        theirs = layer.relative_position_bias_table[layer.relative_position_index.view(-1)].view(16, 16, -1)
        ours = known.bias(4)[:, row[:, None] - row + 3, column[:, None] - column + 3]
        assert_close(ours, theirs.permute(2, 0, 1).detach())


@pytest.mark.parametrize("kind", ["deberta", "deberta-v2"])
def test_deberta_s_terms_are_those_that_its_output_depends_on(kind):
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
    for settings, expected in ((relative, "deberta"), ({}, "learned")):
        model = base_model(kind, **SIZES, **settings)
        layer = layer_positions(model)[0]
        assert layer.kind == expected
        assert ("content to position and position to content" in layer.words) == (expected == "deberta")
        ids = torch.arange(4, 14)[None]
        with torch.no_grad():
            forward, backward = (model(row).last_hidden_state for row in (ids, ids.flip(1)))
            order = (forward - backward.flip(1)).abs().max()
            if expected == "deberta":
                model.encoder.rel_embeddings.weight.zero_()
            else:
                model.embeddings.position_embeddings.weight.zero_()
            forward, backward = (model(row).last_hidden_state for row in (ids, ids.flip(1)))
        assert order > 0.01
        assert (forward - backward.flip(1)).abs().max() < 1e-4  # the order of tokens no longer matters


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


def test_words():
    assert facts(CONFIG_MAPPING["smollm3"]()).positions == [
        "layers 1–36 but every 4th: RoPE, theta 2,000,000, all 128 dimensions, half layout",
        "every 4th layer: no position (NoPE)",
    ]
    gemma = facts(CONFIG_MAPPING["gemma3_text"](sliding_window=512)).positions
    assert gemma[0].startswith("layers 1–26 but every 6th: RoPE, theta 10,000,")
    assert "window 512" in gemma[0]
    assert gemma[1].startswith("every 6th layer: RoPE, theta 1,000,000,")
    sinks = facts(CONFIG_MAPPING["gpt_oss"]()).positions
    assert "scaling yarn × 32 from 4,096 tokens, cos and sin × 1.347" in sinks[0]
    assert sinks[0].endswith("window 128; a learned sink per head")
    assert facts(CONFIG_MAPPING["relpos_llama"](position={"name": "alibi"}, num_hidden_layers=3)).positions == [
        "layers 1–3: relpos alibi"
    ]


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
    with pytest.raises(TypeError, match="not from Linear"):
        layer_positions(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"num_hidden_layers = 1,000,000,000"):
        facts(CONFIG_MAPPING["llama"](num_hidden_layers=10**9, hidden_size=32))
    lying = CONFIG_MAPPING["bert"](**SIZES)
    lying.num_attention_heads = 5
    with pytest.raises(ValueError, match="no model can be built from this BertConfig"):
        facts(lying)
    rotary = Rotary(torch.ones(2), "half", 8)
    with pytest.raises(ValueError, match="have 8 dimensions, not 6"):
        rotary.apply(torch.zeros(3, 6), torch.arange(3))


def test_window_is_part_of_the_words():
    assert f"window {WINDOW}" in layer_positions(small_model("mistral"))[0].words
