"""relpos.use on sparse attention: keys that a layer selects by index, and what a mask must say of them."""

import pytest
import torch
from small_models import EXPERTS, GROUPED, LENGTH, TOKENS, WINDOW, shaken
from test_use import assert_same, assert_same_generation
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import relpos
from relpos.pretrained import interface, use
from relpos.pretrained.probe import probe_tokens

TOP_K = 6  # less than the tokens of a batch, so that something is left out
LATENT = {
    **{**GROUPED, **EXPERTS, "num_key_value_heads": 4, "head_dim": 4, "n_routed_experts": 4, "n_group": 1},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"topk_group": 1, "index_topk": TOP_K, "index_head_dim": 8, "index_n_heads": 2},
}
SPARSE = {
    "deepseek_v32": {**LATENT, "mlp_layer_types": ["dense", "sparse"]},
    "glm_moe_dsa": {**LATENT, "mlp_layer_types": ["dense", "sparse"]},
    "minimax_m3_vl_text": {
        **{**GROUPED, "num_experts_per_tok": 2, "num_local_experts": 4, "dense_intermediate_size": 48},
        **{"shared_intermediate_size": 48, "rotary_dim": 4, "mlp_layer_types": ["sparse", "dense"]},
        **{"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2},
        **{"layer_types": ["minimax_m3_sparse", "full_attention"]},
    },
    "deepseek_v4": {
        **{"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"head_dim": 4, "qk_rope_head_dim": 4, "q_lora_rank": 16, "num_experts_per_tok": 2, "n_routed_experts": 4},
        **{"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"], "index_topk": 2},
        **{"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 4}, "o_groups": 2},
        **{"mlp_layer_types": ["moe", "moe"], "sliding_window": WINDOW, "o_lora_rank": 8, "index_n_heads": 2},
        **{"index_head_dim": 8, "max_position_embeddings": 64},
    },
}


def sparse_model(family, **settings):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**TOKENS, **SPARSE[family], **settings})
    return shaken(AutoModelForCausalLM.from_config(config, attn_implementation="eager")).eval()


def padded(side):
    ids = torch.randint(4, TOKENS["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, slice(LENGTH - 5, None) if side == "right" else slice(None, 5)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def logits_and_gradients(model, inputs):
    model.zero_grad()
    logits = model(**inputs).logits[inputs["attention_mask"].bool()]
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients


def generated(model, side="left", **settings):
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **settings}
    inputs = padded("left") if side else {"input_ids": padded("left")["input_ids"][:1]}
    out = model.generate(**inputs, **settings, return_dict_in_generate=True, output_logits=True)
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize("family", SPARSE)
def test_selected_keys_give_the_logits_gradients_and_tokens_of_eager(family):
    model = sparse_model(family)
    theirs = {side: logits_and_gradients(model, padded(side)) for side in ("right", "left")}
    padding = "left" if family != "minimax_m3_vl_text" else None  # as it says, padding on the left moves its blocks
    tokens = generated(model, padding)
    relpos.use(model)
    for side, expected in theirs.items():
        assert_same(logits_and_gradients(model, padded(side)), expected)
    assert_same_generation(generated(model, padding), tokens)


@pytest.mark.parametrize(("family", "keyword"), [("deepseek_v32", "indices"), ("minimax_m3_vl_text", "block_indices")])
def test_a_selection_that_is_dropped_is_noticed_by_the_probe(family, keyword, monkeypatch):
    model = sparse_model(family)

    def dense(*arguments, **keywords):
        return interface.relpos_attention(*arguments, **{**keywords, keyword: None})

    monkeypatch.setattr(use, "relpos_attention", dense)
    with pytest.raises(ValueError, match=r"the numbers of model\.layers\.0\.self_attn .* differ"):
        relpos.use(model)
    assert model.config._attn_implementation == "eager"


def test_blocks_of_an_unknown_size_are_refused():
    model = relpos.use(sparse_model("minimax_m3_vl_text"))
    indexer = next(module.indexer for module in model.modules() if getattr(module, "indexer", None) is not None)
    block_size, layer = indexer.block_size, model.model.layers[0].self_attn
    del indexer.block_size
    q = torch.randn(1, 4, 8, 8)
    indices = torch.zeros(1, 2, 8, 1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"finds no indexer\.block_size"):
        interface.relpos_attention(layer, q, q, q, None, block_indices=indices)
    indexer.block_size = block_size
    interface.relpos_attention(layer, q, q, q, None, block_indices=indices)


def test_the_probe_is_longer_than_a_top_k():
    assert probe_tokens(sparse_model("deepseek_v32", max_position_embeddings=512, index_topk=200)) > 200
    assert probe_tokens(sparse_model("deepseek_v4")) > 2 * 4


def test_recurrent_gemma_generates_after_padding_on_the_left_as_without_a_cache():
    sizes = {**GROUPED, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": WINDOW}
    torch.manual_seed(0)
    config = CONFIG_MAPPING["recurrent_gemma"](**{**TOKENS, **sizes})
    model = shaken(AutoModelForCausalLM.from_config(config, attn_implementation="eager")).eval()
    theirs = generated(model, use_cache=False)  # with a cache, transformers masks all keys by the first token alone
    assert_same_generation(generated(relpos.use(model)), theirs)
