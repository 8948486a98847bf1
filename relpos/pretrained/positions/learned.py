"""Learned absolute positions: a table whose rows are added to the embeddings."""

from torch import Tensor, nn
from transformers import PreTrainedModel

from relpos.pretrained.positions.description import LayerPosition
from relpos.pretrained.positions.place import Place
from relpos.pretrained.positions.score_changes import sentence

FAMILIES = {
    *("gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt", "biogpt"),
    *("bert", "bert-generation", "albert", "camembert", "convbert", "data2vec-text", "distilbert", "electra", "ernie"),
    *("esm", "megatron-bert", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    *("bart", "blenderbot", "blenderbot-small", "mbart", "plbart", "whisper"),
    *("clip_text_model", "clip_vision_model", "deit", "dinov2", "siglip_text_model", "siglip_vision_model", "vit"),
}
NAMES = ("position_embeddings", "position_embedding", "embed_positions", "wpe", "positions_embed")
ANOTHER_TOKEN = {"vit": "class", "deit": "class and distillation", "dinov2": "class", "clip_vision_model": "class"}


def describe(place: Place) -> LayerPosition | None:
    """The table that is added to the embedding; None if the model has none."""
    table = table_of(place)
    if table is None:
        return None
    rows, first = table
    return LayerPosition(place.name, "learned", sentence(words(rows, first, place), place), table=rows)


def table_of(place: Place) -> tuple[Tensor, int] | None:
    """The table that is added to the embedding of a layer's stack.

    OPT and BART have two unused rows at the start (`offset`); RoBERTa and its kin have a row for the padding token and
    start after it (`padding_idx`).

    Returns:
        The rows from the first token's on, (positions, width), and the number of the first one; None if there are none.
    """
    return next((table for table in map(table_in, place.parts) if table is not None), None)


def table_in(part: PreTrainedModel) -> tuple[Tensor, int] | None:
    """The same, of one model."""
    for name, module in part.named_modules():
        if name.rpartition(".")[2] in NAMES and isinstance(module, nn.Embedding):
            first = getattr(module, "offset", 0 if module.padding_idx is None else module.padding_idx + 1)
            return module.weight[first:].detach(), int(first)
    for name, parameter in part.named_parameters():
        if name.rpartition(".")[2] in NAMES and parameter.dim() == 3:  # (1, positions, width) of images
            return parameter[0].detach(), 0
    return None


def words(rows: Tensor, first: int, place: Place) -> str:
    """One table in words."""
    text = f"learned positions, {rows.shape[0]:,} × {rows.shape[1]:,}, added to the embedding"
    if first:
        text += f"; the first token has row {first}"
    special = ANOTHER_TOKEN.get(place.config.model_type)
    if special:
        text += f"; the {special} token first"
    return text
