"""Absolute positions, learned or sinusoidal: a table whose rows are added to the embeddings."""

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


def describe(layer: ModelLayer) -> LayerPosition | None:
    """The table that is added to the embedding; None if the model has none."""
    table = growing_table(layer) if layer.model_type in GROWING else layer.table()
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
    module = getattr(layer.part, "embed_positions", None)
    if module is None:
        return None
    first = module.offset if layer.model_type == "xglm" else module.padding_idx + 1
    return module.weights[first : first + module.num_positions].detach(), int(first)


ADAPTER = Adapter(TYPES | SINUSOIDAL, describe)
