"""A learned bias per head and 2-D offset between patches, as in Swin and BEiT."""

from typing import Any

from torch import Tensor

from relpos.checkpoints.positions.description import LayerPosition
from relpos.checkpoints.positions.learned import table_of
from relpos.checkpoints.positions.place import Place
from relpos.checkpoints.positions.seen import sentence

FAMILIES = {"beit", "data2vec-vision", "donut-swin", "maskformer-swin", "swin"}


def describe(place: Place) -> LayerPosition | None:
    """The table of one layer, or the one that all layers share; None if the model has none."""
    owners = [module for module in place.part.modules() if hasattr(module, "relative_position_bias_table")]
    inside = [module for module in place.layer.modules() if module in owners]
    added = table_of(place.part)
    absolute = None if added is None else added[0]
    plus = "" if absolute is None else f"learned positions, {absolute.shape[0]:,} × {absolute.shape[1]:,}"
    if not owners:
        kind, main = ("learned", plus + ", added to the embedding") if plus else ("none", "no position")
        return LayerPosition(place.name, kind, main, table=absolute)
    owner: Any = (inside or owners)[0]
    high, wide = owner.window_size
    main = f"2-D table, offsets up to ±{high - 1} × ±{wide - 1}; {'own table' if inside else 'one for all layers'}"

    def bias(window: int) -> Tensor:
        return by_offset(owner, window)

    return LayerPosition(
        place.name, "table 2-D", sentence(f"{main}; and {plus}" if plus else main, place), table=absolute, bias=bias
    )


def by_offset(owner: Any, window: int) -> Tensor:
    """The values at offsets of less than `window` rows and columns: (heads, rows, columns)."""
    high, wide = owner.window_size
    offsets = (2 * high - 1) * (2 * wide - 1)  # BEiT has three more rows, for its class token
    grid = owner.relative_position_bias_table[:offsets].detach().T.unflatten(1, (2 * high - 1, 2 * wide - 1))
    down, across = min(window, high), min(window, wide)
    cut: Tensor = grid[:, high - down : high + down - 1, wide - across : wide + across - 1]
    return cut
