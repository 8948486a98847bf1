"""Small random models of transformers' families, with scores that are far from uniform."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

VOCABULARY = 64
LENGTH = 21  # over the windows and chunks below, and no multiple of anything
WINDOW = 8
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
T5 = {**T5, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "decoder_start_token_id": 0}
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
BART = {**BART, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
BART = {**BART, "decoder_start_token_id": 2, "forced_eos_token_id": None, "forced_bos_token_id": None}
FALCON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ALTERNATING = ["sliding_attention", "full_attention"]
WINDOWED = {"sliding_window": WINDOW, "layer_types": ALTERNATING}

DEBERTA = {**SIZES, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}

DECODERS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": SIZES,
    "mistral": {**GROUPED, "sliding_window": WINDOW},
    "mixtral": {**GROUPED, **EXPERTS, "sliding_window": WINDOW},
    "qwen2": {**GROUPED, "use_sliding_window": True, **WINDOWED},
    "qwen3": {**GROUPED, "use_sliding_window": True, **WINDOWED},
    "qwen3_moe": {**GROUPED, **EXPERTS},
    "gemma": GROUPED,
    "gemma2": {**GROUPED, **WINDOWED, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {**GROUPED, **WINDOWED, "query_pre_attn_scalar": 8},
    "phi": SIZES,
    "phi3": {**GROUPED, "sliding_window": WINDOW},
    "olmo2": GROUPED,
    "smollm3": {**GROUPED, "no_rope_layers": [1, 0]},
    "cohere2": {**GROUPED, **WINDOWED},
    "gpt_oss": {**GROUPED, **EXPERTS, **WINDOWED},
    "granite_swa": {**GROUPED, **WINDOWED},
    "llama4_text": {
        **GROUPED,
        **EXPERTS,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 6,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
    },
    "nanochat": GROUPED,
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    },
    "biogpt": SIZES,
    "stablelm": {**SIZES, "num_key_value_heads": 2},
    "persimmon": SIZES,
    "glm4": {**GROUPED, "partial_rotary_factor": 0.5},
    "inkling_text": {
        **GROUPED,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": WINDOW,
        "d_rel": 4,
        "rel_extent": 10,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "local_layer_ids": [0],
        "log_scaling_n_floor": 4,
    },
    "deepseek_v3": {
        **{**GROUPED, **EXPERTS, "num_key_value_heads": 4, "head_dim": 4, "n_routed_experts": 4, "n_group": 1},
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
        **{"topk_group": 1, "first_k_dense_replace": 1},
    },
    "qwen3_next": {
        **{**GROUPED, **EXPERTS, "layer_types": ["linear_attention", "full_attention"]},
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "shared_expert_intermediate_size": 16},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "falcon": FALCON,
    "falcon alibi": {**FALCON, "alibi": True, "new_decoder_architecture": False, "multi_query": False},
    "falcon grouped": {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": SIZES,
    "modernbert": {**SIZES, "local_attention": WINDOW, "global_attn_every_n_layers": 2},
    "roberta": SIZES,
    "xlm-roberta": SIZES,
    "electra": {**SIZES, "embedding_size": 32},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
    "albert": {**SIZES, "embedding_size": 32},
    "camembert": SIZES,
    "nomic_bert": SIZES,
    "jina_embeddings_v3": SIZES,
    "eurobert": GROUPED,
    "esm": {**SIZES, "mask_token_id": 3},
    "mpnet": SIZES,
    "deberta": {**DEBERTA, "max_relative_positions": 9},
    "deberta-v2": {  # as version 3 has it, and the convolution of the larger ones of version 2
        **DEBERTA,
        "max_relative_positions": 16,
        "position_buckets": 6,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "conv_kernel_size": 3,
    },
    "deberta-v2 own projections": {**DEBERTA, "max_relative_positions": 9, "position_biased_input": True},
    "deberta-v2 one term": {**DEBERTA, "pos_att_type": ["p2c"], "position_buckets": 8},
}
SEQ2SEQ: dict[str, dict[str, Any]] = {
    "t5": T5,
    "mt5": T5,
    "umt5": T5,
    "longt5": {**T5, "local_radius": 4},
    "switch_transformers": {**T5, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 2},
    "bart": BART,
    "marian": BART,
    "pegasus": BART,
    "m2m_100": BART,
}
KINDS = {"decoder": DECODERS, "encoder": ENCODERS, "seq2seq": SEQ2SEQ}
AUTO = {"decoder": AutoModelForCausalLM, "encoder": AutoModelForMaskedLM, "seq2seq": AutoModelForSeq2SeqLM}
FAMILIES = [name for families in KINDS.values() for name in families]


def kind_of(family: str) -> str:
    """decoder, encoder or seq2seq."""
    return next(kind for kind, families in KINDS.items() if family in families)


def small_model(family: str, implementation: str | None = None, **settings: Any) -> PreTrainedModel:
    """A model of a family in evaluation mode, of about 30,000 random weights; "eager" unless that is wrong."""
    if implementation is None:
        implementation = "sdpa" if family == "falcon alibi" else "eager"  # eager adds Falcon's ALiBi twice
    kind = kind_of(family)
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family.split(maxsplit=1)[0]](**{**TOKENS, **KINDS[kind][family], **settings})
    model = AUTO[kind].from_config(config, attn_implementation=implementation)
    return shaken(model).eval()


def shaken(model: nn.Module) -> nn.Module:
    """The model with larger weights: as initialised, attention is almost uniform and would hide mistakes."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.05))
    return model


def batch(family: str, side: str = "right") -> dict[str, Tensor]:
    """Inputs of three rows, of which two are padded on one side."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(4, VOCABULARY, (3, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    for row, padded in ((1, 5), (2, 11)):
        where = slice(LENGTH - padded, None) if side == "right" else slice(None, padded)
        ids[row, where], mask[row, where] = 0, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if kind_of(family) == "seq2seq":
        inputs["decoder_input_ids"] = torch.randint(4, VOCABULARY, (3, 13), generator=generator)
    return inputs


def logits_and_gradients(model: PreTrainedModel, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of all tokens but padding, and the gradient of each parameter under a random weighting of them."""
    model.zero_grad()
    logits = model(**inputs).logits
    if "decoder_input_ids" not in inputs:
        logits = logits[inputs["attention_mask"].bool()]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    (logits * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return logits.detach(), gradients
