"""A learned bias per head and 2-D offset between patches, as in Swin and BEiT."""

from typing import Any

import torch
from torch import Tensor

from relpos.pretrained.layer_position import Adapter, LayerPosition, ModelLayer, words_of_table


def describe(layer: ModelLayer) -> LayerPosition | None:
    """The tables of one layer: its own, and one that all layers share."""
    modules = dict(layer.part.named_modules())
    tables = {name: each for name, each in modules.items() if hasattr(each, "relative_position_bias_table")}
    block = next(name for name, module in modules.items() if module is layer.module).rpartition(".")[0]
    per_layer = [module for name, module in tables.items() if name.startswith(f"{block}.")]  # in the layer or beside it
    shared = [module for name, module in tables.items() if not any(part.isdigit() for part in name.split("."))]
    parts = [words(each, "own table") for each in per_layer]
    parts += [words(each, "one table for all layers") for each in shared]
    added = layer.table()
    absolute = None if added is None else added[0]
    if absolute is not None:
        parts.append(words_of_table(absolute))
    sentence = "; and ".join(parts) or "no position"
    if not per_layer and not shared:
        return layer.position("none" if absolute is None else "learned", sentence, table=absolute)

    def bias(window: int) -> Tensor:
        return torch.stack([by_offset(each, window) for each in (*per_layer, *shared)]).sum(0)

    return layer.position("table 2-D", sentence, table=absolute, bias=bias)


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


ADAPTER = Adapter({"beit", "donut-swin", "maskformer-swin", "swin"}, describe)
