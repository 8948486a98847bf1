"""T5's buckets: one learned value per head and bucket of distances, added to the scores."""

from typing import Any

import torch
from torch import Tensor

from relpos.pretrained.positions.description import LayerPosition
from relpos.pretrained.positions.learned import table_of
from relpos.pretrained.positions.place import Place
from relpos.pretrained.positions.score_changes import sentence

FAMILIES = {"longt5", "mpnet", "mt5", "pop2piano", "switch_transformers", "t5", "umt5"}


def describe(place: Place) -> LayerPosition | None:
    """The bias of one layer: from its own table, or from the one that the layers of its stack share."""
    owners = [module for module in place.part.modules() if hasattr(module, "relative_attention_bias")]
    if not owners:
        return None
    own = place.layer in owners
    owner: Any = place.layer if own else owners[0]
    shared = "one table for all layers" if len(owners) == 1 else "a table per layer"
    main = f"T5 buckets: {owner.relative_attention_bias.num_embeddings}, up to distance {reach(owner):,}; {shared}"
    if place.config.model_type == "mpnet":
        added = table_of(place)
        assert added is not None
        rows, first = added
        main += f"; and learned positions, {rows.shape[0]:,} × {rows.shape[1]:,}, the first token has row {first}"
        table: Tensor | None = rows
    else:
        main += "; scores are not scaled"
        table = None
    if "Local" in type(place.layer).__name__ or "Transient" in type(place.layer).__name__:
        main += f"; blocks of {place.layer.block_len} tokens and their neighbours"

    def bias(length: int) -> Tensor:
        return by_distance(owner, length)

    return LayerPosition(place.name, "buckets", sentence(main, place), table=table, bias=bias)


def reach(owner: Any) -> int:
    """The distance from which on all share a bucket."""
    return int(getattr(owner, "relative_attention_max_distance", 128))  # MPNet has no entry for it


def by_distance(owner: Any, length: int) -> Tensor:
    """The values at the distances −(length − 1) to length − 1: (heads, 2·length − 1)."""
    table = owner.relative_attention_bias
    relative = torch.arange(length - 1, -length, -1, device=table.weight.device)  # key minus query
    if hasattr(owner, "relative_position_bucket"):  # MPNet
        which = owner.relative_position_bucket(relative)
    elif type(owner).__name__ == "UMT5Attention":
        which = owner._relative_position_bucket(relative)
    else:
        which = owner._relative_position_bucket(
            relative,
            bidirectional=not owner.is_decoder,
            num_buckets=owner.relative_attention_num_buckets,
            max_distance=owner.relative_attention_max_distance,
        )
    values: Tensor = table(which).T.detach()
    return values
