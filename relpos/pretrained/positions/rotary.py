"""Rotary positions: queries and keys turned by angles proportional to their positions."""

from typing import Any, Literal

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from relpos.pretrained.positions.description import LayerPosition, Rotary
from relpos.pretrained.positions.place import Place
from relpos.pretrained.positions.score_changes import sentence

FAMILIES = {  # each was compared with the queries and keys of a small model: tests/pretrained/test_position_kinds.py
    *("apertus", "arcee", "aria_text", "bitnet", "codegen", "cohere", "cohere2", "cwm", "deepseek_v2"),
    *("deepseek_v3", "diffllama", "embedding_gemma2_text", "ernie4_5", "ernie4_5_moe", "esm", "eurobert"),
    *("exaone4", "exaone_moe", "falcon", "falcon_h1", "flex_olmo", "gemma", "gemma2", "gemma3_text"),
    *("gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_neox", "gpt_oss"),
    *("gptj", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "gte", "helium"),
    *("higgs_audio_v2", "hy_v3", "hyperclovax", "jais2", "jetmoe", "jina_embeddings_v3", "laguna", "lfm2"),
    *("llama", "llama4_text", "mellum", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2"),
    *("minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "modernbert", "modernbert-decoder"),
    *("molmo2_text", "moshi", "nanochat", "nemotron", "nomic_bert", "olmo", "olmo2", "olmo3"),
    *("olmo_hybrid", "olmoe", "openai_privacy_filter", "persimmon", "phi", "phi3", "phimoe", "qwen2"),
    *("qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_5_moe_text", "qwen3_5_text"),
    *("qwen3_moe", "qwen3_next", "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss", "smollm3", "solar_open"),
    *("stablelm", "starcoder2", "ultrabert", "vaultgemma"),
}
PAIRS = {  # families whose neighbouring dimensions form a pair; in all others dimension m and m + rotated / 2 do
    "codegen",
    "cohere",
    "cohere2",
    "deepseek_v2",
    "ernie4_5",
    "ernie4_5_moe",
    "glm",
    "glm4",
    "gptj",
    "helium",
    "llama4_text",
    "openai_privacy_filter",
}
BY_LENGTH = ("dynamic", "longrope")  # scalings whose frequencies depend on the length
BACKWARDS = {"nanochat"}  # turn by −i·θ, which gives the same scores


def describe(place: Place) -> LayerPosition | None:
    """The rotation of one layer; None for a model of these families that is built without one."""
    rotation = rotation_of(place)
    if rotation is None:
        return None
    if not rotates(place):
        return LayerPosition(place.name, "none", sentence("no position (NoPE)", place))
    frequencies, factor = rotation
    parameters = parameters_of(place)
    layer, kind = place.layer, place.config.model_type
    rotated = 2 * frequencies.shape[-1]
    nope = getattr(layer, "qk_nope_head_dim", 0)  # multi-head latent attention: the rotated part comes last
    rotary = Rotary(
        frequencies=-frequencies if kind in BACKWARDS else frequencies,
        rotated=rotated,
        head_dim=head_dim_of(place),
        layout=layout_of(kind),
        factor=factor,
        scaling=parameters,
        start=nope,
    )
    return LayerPosition(place.name, "rotary", sentence(words(rotary), place), rotary=rotary)


def layout_of(kind: str) -> Literal["halves", "pairs"]:
    """How the dimensions of queries and keys are paired when they reach attention."""
    return "pairs" if kind in PAIRS else "halves"


def rotates(place: Place) -> bool:
    """Whether a layer of a rotary model rotates."""
    layer, kind = place.layer, place.config.model_type
    if kind == "cohere2":
        return layer.sliding_window is not None
    if kind in ("exaone4", "exaone_moe"):
        return layer.sliding_window is None or bool(layer.is_sliding)
    return bool(getattr(layer, "use_rope", True))


def rotation_of(place: Place) -> tuple[Tensor, float] | None:
    """The frequencies and the factor, from the model's own module or table."""
    table = getattr(place.layer, "embed_positions", None)  # GPT-J: the sines, then the cosines of each position
    if isinstance(table, Tensor):
        sin, cos = table[1].chunk(2)
        return torch.atan2(sin, cos), 1.0
    for module in (module for part in (place.layer, *place.parts) for module in part.modules()):
        frequencies = frequencies_of(module, place)
        if frequencies is not None:
            return frequencies
    return None


def frequencies_of(module: Any, place: Place) -> tuple[Tensor, float] | None:
    """The frequencies and the factor that a rotary module has for a layer; None if it is no such module."""
    if "Rotary" not in type(module).__name__:
        return None
    kind = parameters_of(place).get("rope_type")
    for layer_type in (place.layer_type, None):
        prefix = "" if layer_type is None else f"{layer_type}_"
        # `inv_freq` is that of the last length for scalings that depend on it, `original_inv_freq` that of short ones.
        for name in (f"{prefix}original_inv_freq", f"{prefix}inv_freq"):
            frequencies = getattr(module, name, None)
            if not isinstance(frequencies, Tensor):
                continue
            if kind in BY_LENGTH and place.length is not None:
                frequencies, factor = ROPE_INIT_FUNCTIONS[kind](
                    module.config, frequencies.device, seq_len=place.length, layer_type=layer_type
                )
                return frequencies, float(factor)
            return frequencies.detach(), float(getattr(module, f"{prefix}attention_scaling", 1.0))
    return None


def parameters_of(place: Place) -> dict[str, Any]:
    """The rope parameters of a layer, as the configuration has them."""
    parameters = getattr(place.config, "rope_parameters", None) or {}
    own = parameters.get(place.layer_type)
    return dict(own if isinstance(own, dict) else parameters)


def head_dim_of(place: Place) -> int:
    """Size of a query."""
    for name in ("qk_head_dim", "head_dim", "head_size", "attention_head_size"):
        size = getattr(place.layer, name, None) or getattr(place.config, name, None)
        if isinstance(size, int):
            return size
    return int(place.config.hidden_size // place.config.num_attention_heads)


def words(rotary: Rotary) -> str:
    """One rotation in words."""
    parameters = rotary.scaling
    if rotary.rotated == rotary.head_dim:
        which = f"all {rotary.head_dim} dimensions"
    else:
        side = "last" if rotary.start else "first"
        which = f"the {side} {rotary.rotated} of {rotary.head_dim} dimensions"
    theta = parameters.get("rope_theta", 10_000)  # the families without the entry have a fixed one
    parts = ["RoPE", f"theta {theta:,.10g}", which, rotary.layout]
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
