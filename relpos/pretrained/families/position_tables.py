"""Tables of positions: rows, learned or sinusoidal, added to embeddings; a bias per 2-D offset, as in Swin and BEiT."""

from typing import Any

import torch
from torch import Tensor

from relpos.pretrained.layer_position import Adapter, LayerPosition, ModelLayer, words_of_table

TYPES = {
    *("gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt", "biogpt"),
    *("bert", "bert-generation", "albert", "camembert", "convbert", "data2vec-text", "distilbert", "electra", "ernie"),
    *("esm", "megatron-bert", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    *("bart", "blenderbot", "blenderbot-small", "mbart", "plbart", "whisper"),
    *("clip_text_model", "clip_vision_model", "deit", "dinov2", "siglip_text_model", "siglip_vision_model", "vit"),
}
GROWING = {"m2m_100", "nllb-moe", "xglm"}  # sinusoidal: fairseq's buffer, which grows with the input
SINUSOIDAL = {"marian", "pegasus", *GROWING}
SPECIAL_TOKENS = {"vit": "class", "deit": "class and distillation", "dinov2": "class", "clip_vision_model": "class"}


def describe_rows(layer: ModelLayer) -> LayerPosition | None:
    """The table that is added to the embedding; None if the model has none."""
    table = growing_table(layer) if layer.model_type in GROWING else layer.table
    if table is None:
        return None
    rows, first = table
    kind = "sinusoidal" if is_sinusoidal(layer) else "learned"
    words = words_of_table(rows, kind)
    if first:
        words += f"; the first token has row {first}"
    if layer.model_type in SPECIAL_TOKENS:
        words += f"; the {SPECIAL_TOKENS[layer.model_type]} token first"
    return layer.position(kind, words, table=rows)


def is_sinusoidal(layer: ModelLayer) -> bool:
    """Whether the table is one of sines and cosines, which is not trained."""
    if layer.model_type == "whisper":
        return "Encoder" in type(layer.part).__name__
    if layer.model_type == "distilbert":
        return bool(layer.config.sinusoidal_pos_embds)
    return layer.model_type in SINUSOIDAL


def growing_table(layer: ModelLayer) -> tuple[Tensor, int] | None:
    """The rows of a buffer that grows, from the first token's on, and the number of the first one."""
    module: Any = getattr(layer.part, "embed_positions", None)
    if module is None:
        return None
    first = int(module.offset if layer.model_type == "xglm" else module.padding_idx + 1)
    return module.weights[first : first + module.num_positions].detach(), first


def describe_offsets(layer: ModelLayer) -> LayerPosition | None:
    """The 2-D tables of one layer: its own, and one that all layers share."""
    modules = dict(layer.part.named_modules())
    block = next(name for name, module in modules.items() if module is layer.module).rpartition(".")[0]
    owners: list[Any] = []
    parts = []
    for name, module in modules.items():
        in_layer = name.startswith(f"{block}.")  # in the layer or beside it
        shared = not any(part.isdigit() for part in name.split("."))
        if hasattr(module, "relative_position_bias_table") and (in_layer or shared):
            owners.append(module)
            high, wide = module.window_size
            whose = "own table" if in_layer else "one table for all layers"
            parts.append(f"2-D table, offsets up to ±{high - 1} × ±{wide - 1}, {whose}")
    rows = None if layer.table is None else layer.table[0]
    if rows is not None:
        parts.append(words_of_table(rows))
    sentence = "; and ".join(parts) or "no position"
    if not owners:
        return layer.position("none" if rows is None else "learned", sentence, table=rows)

    def bias(window: int) -> Tensor:
        return torch.stack([by_offset(owner, window) for owner in owners]).sum(0)

    return layer.position("table 2-D", sentence, table=rows, bias=bias)


def by_offset(owner: Any, window: int) -> Tensor:
    """The values at offsets of less than `window` rows and columns: (heads, rows, columns)."""
    high, wide = owner.window_size
    offsets = (2 * high - 1) * (2 * wide - 1)  # BEiT has three more rows, for its class token
    grid = owner.relative_position_bias_table[:offsets].detach().T.unflatten(1, (2 * high - 1, 2 * wide - 1))
    down, across = min(window, high), min(window, wide)
    cut: Tensor = grid[:, high - down : high + down - 1, wide - across : wide + across - 1]
    return cut


ROWS = Adapter(TYPES | SINUSOIDAL, describe_rows)
OFFSETS = Adapter({"beit", "donut-swin", "maskformer-swin", "swin"}, describe_offsets)
