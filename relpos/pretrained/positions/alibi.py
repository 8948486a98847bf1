"""ALiBi: a penalty proportional to the distance, with a fixed slope per head."""

import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as mpt_alibi

from relpos.pretrained.positions.description import LayerPosition
from relpos.pretrained.positions.place import Place
from relpos.pretrained.positions.score_changes import sentence

FAMILIES = {"bloom", "falcon", "mpt"}
NOTES = {
    "bloom": "padding is not counted",
    "falcon": "divided by √head_dim, rounded to bfloat16; padding is not counted",
    "mpt": "padding is counted",
}


def describe(place: Place) -> LayerPosition | None:
    """The bias of one layer; None for a Falcon with rotary positions."""
    kind = place.config.model_type
    if kind == "falcon" and not place.config.alibi:
        return None
    slopes = slopes_of(place)

    def bias(length: int) -> Tensor:
        return -slopes[:, None] * torch.arange(1 - length, length)

    main = f"ALiBi, slopes {slopes.max():.3g} to {slopes.min():.3g}; {NOTES[kind]}"
    return LayerPosition(place.name, "alibi", sentence(main, place), bias=bias)


def slopes_of(place: Place) -> Tensor:
    """What the scores of each head lose per token of distance, after the model's own scale: (heads,)."""
    heads = place.config.num_attention_heads
    two = torch.ones(1, 2, dtype=torch.long)
    if place.config.model_type == "mpt":
        values = mpt_alibi(heads, 2)
    elif place.config.model_type == "bloom":
        values = bloom_alibi(two, heads, torch.float32)
    else:
        values = falcon_alibi(two, heads, torch.float32) * place.layer.inv_norm_factor
    slopes: Tensor = (values[:, 0, 1] - values[:, 0, 0]).float()
    return slopes
