"""Rotary positions: queries and keys turned by angles proportional to their positions."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from relpos.pretrained.layer_position import Adapter, LayerPosition, ModelLayer, Rotary

# Model types by layout; each was compared with the queries and keys of a small model (test_position_kinds.py).
HALF = {  # dimensions m and m + rotated / 2 form a pair
    *("apertus", "arcee", "aria_text", "bitnet", "cwm", "deepseek_v3", "diffllama"),
    *("embedding_gemma2_text", "esm", "eurobert", "exaone4", "exaone_moe", "falcon_h1", "flex_olmo"),
    *("gemma", "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "glm4_moe"),
    *("glm4_moe_lite", "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa"),
    *("granitemoeshared", "gte", "higgs_audio_v2", "hy_v3", "hyperclovax", "jais2", "jetmoe"),
    *("jina_embeddings_v3", "laguna", "lfm2", "llama", "mellum", "mimo_v2_flash", "minicpm3", "minimax"),
    *("minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "modernbert"),
    *("modernbert-decoder", "molmo2_text", "moshi", "nanochat", "nemotron", "nomic_bert", "olmo"),
    *("olmo2", "olmo3", "olmo_hybrid", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2"),
    *("qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_5_moe_text", "qwen3_5_text"),
    *("qwen3_moe", "qwen3_next", "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss", "smollm3"),
    *("solar_open", "stablelm", "starcoder2", "ultrabert", "vaultgemma"),
}
INTERLEAVED = {  # neighbouring dimensions form a pair
    *("codegen", "cohere", "cohere2", "deepseek_v2", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "gptj"),
    *("helium", "llama4_text", "openai_privacy_filter"),
}
BY_LENGTH = ("dynamic", "longrope")  # scalings whose frequencies depend on the length
BACKWARDS = {"nanochat"}  # turn by −i·θ, which gives the same scores


def describe(layer: ModelLayer) -> LayerPosition | None:
    """The rotation of one layer; None for a model of these families that is built without one."""
    rotation = rotation_of(layer)
    if rotation is None:
        return None
    if not rotates(layer):
        return layer.position("none", "no position (NoPE)")
    frequencies, factor = rotation
    rotary = Rotary(
        frequencies=-frequencies if layer.model_type in BACKWARDS else frequencies,
        layout="interleaved" if layer.model_type in INTERLEAVED else "half",
        head_dim=head_dim_of(layer),
        factor=factor,
        scaling=parameters_of(layer),
        start=getattr(layer.module, "qk_nope_head_dim", 0),  # multi-head latent attention: the rotated part comes last
    )
    return layer.position("rotary", words(rotary), rotary=rotary)


def rotates(layer: ModelLayer) -> bool:
    """Whether a layer of a rotary model rotates."""
    module = layer.module
    if layer.model_type == "cohere2":
        return module.sliding_window is not None
    if layer.model_type in ("exaone4", "exaone_moe"):
        return module.sliding_window is None or bool(module.is_sliding)
    return bool(getattr(module, "use_rope", True))


def rotation_of(layer: ModelLayer) -> tuple[Tensor, float] | None:
    """The frequencies and the factor of a layer, from the model's own module or table."""
    table = getattr(layer.module, "embed_positions", None)  # GPT-J: the sines, then the cosines of each position
    if isinstance(table, Tensor):
        sin, cos = table[1].chunk(2)
        return torch.atan2(sin, cos), 1.0
    for module in (module for part in (layer.module, *layer.parts) for module in part.modules()):
        frequencies = frequencies_of(module, layer)
        if frequencies is not None:
            return frequencies
    return None


def frequencies_of(module: Any, layer: ModelLayer) -> tuple[Tensor, float] | None:
    """The frequencies and the factor that a rotary module has for a layer; None if it is another module."""
    if "Rotary" not in type(module).__name__:
        return None
    kind = parameters_of(layer).get("rope_type")
    for layer_type in (layer.layer_type, None):
        prefix = "" if layer_type is None else f"{layer_type}_"
        # `inv_freq` is that of the last length for scalings that depend on it, `original_inv_freq` that of short ones.
        for name in (f"{prefix}original_inv_freq", f"{prefix}inv_freq"):
            frequencies = getattr(module, name, None)
            if not isinstance(frequencies, Tensor):
                continue
            if kind in BY_LENGTH and layer.length is not None:
                frequencies, factor = ROPE_INIT_FUNCTIONS[kind](
                    module.config, frequencies.device, seq_len=layer.length, layer_type=layer_type
                )
                return frequencies, float(factor)
            return frequencies.detach(), float(getattr(module, f"{prefix}attention_scaling", 1.0))
    return None


def parameters_of(layer: ModelLayer) -> Mapping[str, Any]:
    """The rope parameters of a layer, as the configuration has them."""
    parameters = getattr(layer.config, "rope_parameters", None) or {}
    of_type = parameters.get(layer.layer_type)
    return dict(of_type if isinstance(of_type, dict) else parameters)


def head_dim_of(layer: ModelLayer) -> int:
    """Size of a query."""
    for name in ("qk_head_dim", "head_dim", "head_size", "attention_head_size"):
        size = getattr(layer.module, name, None) or getattr(layer.config, name, None)
        if isinstance(size, int):
            return size
    return int(layer.config.hidden_size // layer.config.num_attention_heads)


def words(rotary: Rotary) -> str:
    """One rotation in words."""
    parameters = rotary.scaling
    if rotary.rotated == rotary.head_dim:
        which = f"all {rotary.head_dim} dimensions"
    else:
        side = "last" if rotary.start else "first"
        which = f"the {side} {rotary.rotated} of {rotary.head_dim} dimensions"
    theta = parameters.get("rope_theta", 10_000)  # the families without the entry have a fixed one
    parts = ["RoPE", f"theta {theta:,.10g}", which, f"{rotary.layout} layout"]
    kind = parameters.get("rope_type", "default")
    if kind == "proportional":
        share = parameters.get("partial_rotary_factor", 1.0)
        parts[2] = f"the fastest {share:.0%} of the pairs of all {rotary.head_dim} dimensions"
    if kind not in ("default", "proportional"):
        factor = f" × {parameters['factor']:g}" if parameters.get("factor") else ""
        original = parameters.get("original_max_position_embeddings")
        parts.append(f"scaling {kind}{factor}" + (f" from {original:,} tokens" if original else ""))
    if parameters.get("mrope_section"):
        parts.append(f"M-RoPE with {len(parameters['mrope_section'])} axes, which are equal for text")
    if rotary.factor != 1.0:
        parts.append(f"cos and sin × {rotary.factor:.4g}")
    return ", ".join(parts)


ADAPTER = Adapter(HALF | INTERLEAVED, describe)
