"""The numbers behind every picture and behind the explorer: layers, the values of their heads, maps and measures."""

LENGTH, HEADS, HEAD_DIM = 512, 12, 64  # of an untrained encoding, unless others are asked for
# Of the options of operations that read models or tensors: what is meant.
BOS = (
    "Whether models that others trained see their special tokens, BOS or CLS and SEP, around each window: "
    "docs/evaluation.md."
)
TENSOR = (
    "a tensor or array that you already have: (tokens, tokens), (heads, tokens, tokens) or (layers, heads, tokens, "
    "tokens); rows are queries, NaN and −inf are keys that are not seen. Or one per layer, as the "
    "`attentions` of transformers."
)
NO_ATTENTIONS = (
    "The attentions of a transformers model are there only after "
    'model.set_attn_implementation("eager"), with output_attentions=True.'
)


def check_encoding_request(layer: object, text: object) -> None:
    """Refuse a layer and a text for an encoding without a model."""
    if text is not None:
        raise ValueError("an encoding without a model reads no text: give a run's folder, or leave the text out.")
    if layer not in ("last", "all", 1):
        raise ValueError(f"an encoding without a model has one layer, not layer {layer}: leave the layer out.")
