"""A learned bias per head and 2-D offset between patches, as in Swin and BEiT."""

from typing import Any

import torch
from torch import Tensor

from relpos.pretrained.positions.description import LayerPosition
from relpos.pretrained.positions.learned import table_of
from relpos.pretrained.positions.place import Place
from relpos.pretrained.positions.score_changes import sentence

FAMILIES = {"beit", "donut-swin", "maskformer-swin", "swin"}


def describe(place: Place) -> LayerPosition | None:
    """The tables of one layer: its own, and one that all layers share."""
    modules = dict(place.part.named_modules())
    tables = {name: each for name, each in modules.items() if hasattr(each, "relative_position_bias_table")}
    block = next(name for name, module in modules.items() if module is place.layer).rpartition(".")[0]
    own = [module for name, module in tables.items() if name.startswith(f"{block}.")]  # in the layer or beside it
    shared = [module for name, module in tables.items() if not any(part.isdigit() for part in name.split("."))]
    parts = [words(each, "own table") for each in own] + [words(each, "one table for all layers") for each in shared]
    added = table_of(place)
    if added is not None:
        parts.append(f"learned positions, {added[0].shape[0]:,} × {added[0].shape[1]:,}, added to the embedding")
    main = sentence("; and ".join(parts) or "no position", place)
    absolute = None if added is None else added[0]
    if not own and not shared:
        return LayerPosition(place.name, "none" if added is None else "learned", main, table=absolute)

    def bias(window: int) -> Tensor:
        return torch.stack([by_offset(each, window) for each in (*own, *shared)]).sum(0)

    return LayerPosition(place.name, "table 2-D", main, table=absolute, bias=bias)


def words(owner: Any, whose: str) -> str:
    """One table in words."""
    high, wide = owner.window_size
    return f"2-D table, offsets up to ±{high - 1} × ±{wide - 1}, {whose}"


def by_offset(owner: Any, window: int) -> Tensor:
    """The values at offsets of less than `window` rows and columns: (heads, rows, columns)."""
    high, wide = owner.window_size
    offsets = (2 * high - 1) * (2 * wide - 1)  # BEiT has three more rows, for its class token
    grid = owner.relative_position_bias_table[:offsets].detach().T.unflatten(1, (2 * high - 1, 2 * wide - 1))
    down, across = min(window, high), min(window, wide)
    cut: Tensor = grid[:, high - down : high + down - 1, wide - across : wide + across - 1]
    return cut
