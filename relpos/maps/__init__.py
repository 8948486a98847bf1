"""The numbers behind every picture and behind the explorer: layers, the values of their heads, maps and measures."""

LENGTH, HEADS, HEAD_DIM = 512, 12, 64  # of an untrained encoding, unless others are asked for
# Of the options of operations that read models or tensors: what is meant.
BOS = (
    "Whether models that others trained see their special tokens, BOS or CLS and SEP, around each window: "
    "docs/evaluation.md."
)
TENSOR = (
    "a tensor or array that you already have: (heads, tokens, tokens) or (layers, heads, tokens, tokens), rows are "
    "queries, NaN and −inf are keys that are not seen; or one per layer, as the `attentions` of transformers."
)
