"""Small random models of transformers' families, with scores that are far from uniform."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
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

LATENT = {  # latent attention
    **{**GROUPED, **EXPERTS, "num_key_value_heads": 4, "head_dim": 4, "n_routed_experts": 4, "n_group": 1},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
    "topk_group": 1,
}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR = {**LINEAR, "layer_types": ["linear_attention", "full_attention"]}

Settings = dict[str, dict[str, Any]]
DECODERS: Settings = {
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
        **{**GROUPED, **EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": 6, "no_rope_layers": [1, 0]},
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "nanochat": GROUPED,
    "opt": {**FALCON, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "biogpt": SIZES,
    "stablelm": {**SIZES, "num_key_value_heads": 2},
    "persimmon": SIZES,
    "glm4": {**GROUPED, "partial_rotary_factor": 0.5},
    "inkling_text": {
        **{**GROUPED, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4},
        **{"sliding_window_size": WINDOW, "rel_extent": 10, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 16, "local_layer_ids": [0], "log_scaling_n_floor": 4},
    },
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 1},
    "qwen3_next": {**GROUPED, **EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "falcon": FALCON,
    "falcon alibi": {**FALCON, "alibi": True, "new_decoder_architecture": False, "multi_query": False},
    "falcon grouped": {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
}
TOP_K = 6  # less than the tokens of a batch, so that something is left out
INDEXED = {"index_topk": TOP_K, "index_head_dim": 8, "index_n_heads": 2, "mlp_layer_types": ["dense", "sparse"]}
SPARSE: Settings = {  # decoders whose layers select keys
    "deepseek_v32": {**LATENT, **INDEXED},
    "glm_moe_dsa": {**LATENT, **INDEXED},
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
    "recurrent_gemma": {**GROUPED, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": WINDOW},
}
ENCODERS: Settings = {
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
        **{**DEBERTA, "max_relative_positions": 16, "position_buckets": 6, "share_att_key": True},
        **{"norm_rel_ebd": "layer_norm", "conv_kernel_size": 3},
    },
    "deberta-v2 own projections": {**DEBERTA, "max_relative_positions": 9, "position_biased_input": True},
    "deberta-v2 one term": {**DEBERTA, "pos_att_type": ["p2c"], "position_buckets": 8},
}
SEQ2SEQ: Settings = {
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
    return next((kind for kind, families in KINDS.items() if family in families), "decoder")


def small_model(family: str, implementation: str | None = None, **settings: Any) -> PreTrainedModel:
    """A model of a family in evaluation mode, of about 30,000 random weights; "eager" unless that is wrong."""
    if implementation is None:
        implementation = "sdpa" if family == "falcon alibi" else "eager"  # eager adds Falcon's ALiBi twice
    kind = kind_of(family)
    torch.manual_seed(0)
    sizes = SPARSE[family] if family in SPARSE else KINDS[kind][family]
    config = CONFIG_MAPPING[family.split(maxsplit=1)[0]](**{**TOKENS, **sizes, **settings})
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
    """Inputs of three rows, of which two are padded on one side; "" for no side."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(4, VOCABULARY, (3, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    for row, padded in ((1, 5), (2, 11)) if side else ():
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


def assert_same(ours: tuple[Tensor, dict[str, Tensor]], theirs: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Logits and gradients that agree to float32's rounding."""
    (our_logits, our_gradients), (their_logits, their_gradients) = ours, theirs
    torch.testing.assert_close(our_logits, their_logits, rtol=0, atol=3e-5 * their_logits.abs().max().item())
    assert our_gradients.keys() == their_gradients.keys()
    largest = max(gradient.abs().max().item() for gradient in their_gradients.values())
    for name, gradient in their_gradients.items():  # some, as of the biases of keys, are 0 but for rounding
        scale = max(gradient.abs().max().item(), 0.01 * largest)
        error = (our_gradients[name] - gradient).abs().max().item()
        assert error <= 1e-4 * scale, f"gradient of {name}: off by {error}, largest {scale}"


def assert_equal(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Logits and gradients that agree bit by bit."""
    assert torch.equal(one[0], other[0])
    assert all(torch.equal(one[1][name], gradient) for name, gradient in other[1].items())


def generated(model: PreTrainedModel, family: str, side: str = "left", **settings: Any) -> tuple[Tensor, Tensor]:
    """Tokens, and the logits of each step."""
    inputs = {name: x for name, x in batch(family, side).items() if name != "decoder_input_ids"}
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, **settings}
    out = model.generate(**inputs, **settings, return_dict_in_generate=True, output_logits=True)
    return out.sequences, torch.stack(out.logits)


def assert_same_generation(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=3e-5 * theirs[1].abs().max().item())


TEXT = "w05 w09 w12 w07 w30 w31 w09 w09 w08 w40 w50 w51 w52 w53 w05 w06 w07"


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Of the 64 words w00 to w63."""
    tokenizer = Tokenizer(WordLevel({f"w{i:02}": i for i in range(64)}, unk_token="w03"))
    tokenizer.pre_tokenizer = Whitespace()
    names = {"pad_token": "w00", "bos_token": "w01", "eos_token": "w02", "mask_token": "w04"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def write_words(file: Path, count: int) -> list[int]:
    """Write a text of random words, and return their ids."""
    words: list[int] = torch.randint(5, 64, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    file.write_text(" ".join(f"w{word:02}" for word in words))
    return words


def saved(model: PreTrainedModel, folder: Path) -> Path:
    """The folder of a model and its tokenizer."""
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder
