"""What else changes the scores of a layer: windows, softcaps, sinks, norms; in words."""

from relpos.pretrained.positions.place import Place

NORMS = ("q_norm", "q_layernorm", "qk_norm", "query_layernorm", "query_norm", "q_ln", "norm_q")
NORM_LAST = ("llama4_text", "nanochat")  # families that normalise after they rotate


def window_of(place: Place) -> int | None:
    """How many tokens a query sees, itself included, in a causal layer; how many to each side in others."""
    config, kind = place.config, place.layer_type
    if config.model_type == "gpt_neo":
        return int(config.window_size) if config.attention_layers[place.index] == "local" else None
    if kind is not None and kind != "sliding_attention":
        return None
    size = getattr(config, "sliding_window", None)
    if size is None and kind is not None:
        size = getattr(place.layer, "sliding_window", None)
    if kind is None and not getattr(config, "use_sliding_window", True):
        return None
    return size if isinstance(size, int) and size > 0 else None


def also(place: Place) -> list[str]:
    """The other properties of a layer's scores, each as a few words."""
    layer, config = place.layer, place.config
    words = []
    window = window_of(place)
    if window is not None:
        words.append(f"window {window:,}" if getattr(layer, "is_causal", True) else f"window {window:,} to each side")
    if place.layer_type == "chunked_attention":
        words.append(f"chunks of {config.attention_chunk_size:,} tokens")
    if any(getattr(layer, name, None) is not None for name in NORMS):
        words.append(
            "q and k normalised after the rotation" if config.model_type in NORM_LAST else "q and k normalised"
        )
    softcap = getattr(layer, "attn_logit_softcapping", None)
    if softcap:
        words.append(f"softcap {softcap:g}")
    if getattr(layer, "sinks", None) is not None:
        words.append("a learned sink per head")
    if getattr(layer, "attn_temperature_tuning", False) and not getattr(layer, "use_rope", True):
        words.append(f"temperature by position from {config.floor_scale:,} tokens on")
    return words


def sentence(main: str, place: Place) -> str:
    """The words of a layer: its position, and what else changes its scores."""
    return "; ".join([main, *also(place)])
