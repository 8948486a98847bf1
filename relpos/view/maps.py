"""The numbers behind a picture: a layer's map, looked at a few rows at a time, never length × length at once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relpos.view.cells import PIXELS, Cells
from relpos.view.layers import Layer
from relpos.view.numbers import Diagonals, Share, context_dependence, uniformity

NUMBERS = 2**21  # that a tile writes out at a time


@dataclass(frozen=True)
class Map:
    """One layer's map of every head, reduced to the cells of a page, with what was measured on all its entries."""

    layer: int
    show: str  # bias, scores or weights
    length: int
    cell: int  # tokens a side of a cell
    low: NDArray[np.float32]  # (heads, cells, cells): minimum, mean and maximum of each; NaN where no key is seen
    mean: NDArray[np.float32]
    high: NDArray[np.float32]
    profile: NDArray[np.float32]  # (3, heads, length): minimum, mean and maximum at every distance
    uniformity: Share
    context: Share | None  # None where there was no second input to compare with

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.mean)

    def range(self, head: int | None = None) -> tuple[float, float]:
        """The smallest and the largest value, of one head (0 is the first) or of all."""
        chosen = slice(None) if head is None else head
        return float(np.nanmin(self.low[chosen])), float(np.nanmax(self.high[chosen]))


@torch.no_grad()
def look(
    layer: Layer,
    show: str,
    other: Layer | None = None,
    pixels: int = PIXELS,
    progress: Callable[[float], None] = lambda done: None,
) -> Map:
    """The map of a layer; `other` is the same layer on another input, for the context dependence."""
    heads, length = layer.heads, layer.length
    cells = Cells(heads, length, pixels)
    mine, others = Diagonals(heads, length), Diagonals(heads, length)
    difference = torch.zeros(heads, dtype=torch.float64)
    # Of a function of the distance, one row of cells tells all the others, and the last row of tokens all diagonals.
    short = cells.size > 1 and layer.by_distance(show) and (other is None or other.by_distance(show))
    begin = max(0, length // cells.size - 1) * cells.size if short else 0
    for first, last in tiles(layer, begin):
        values = layer.rows(show, first, last).double()
        cells.add(values)
        if not short:
            mine.add(values)
            if other is not None:
                compared = other.rows(show, first, last).double()
                others.add(compared)
                difference += squares(values - compared)
        progress((last + 1 - begin) * (last + 1 + begin) / (length - begin) / (length + begin))
    if short:
        cells.repeat_along_diagonals()
        here, there = (
            one.rows(show, length - 1, length - 1)[:, 0].double().flip(-1) for one in (layer, other or layer)
        )
        mine.add_distances(here)
        others.add_distances(there)
        difference = ((here - there).nan_to_num() ** 2 * mine.count).sum(dim=1)
    low, mean, high = cells.finished()
    profile = torch.stack([mine.low, mine.mean, mine.high]).float().numpy()
    context = None if other is None else context_dependence(mine, others, difference)
    return Map(layer.number, show, length, cells.size, low, mean, high, profile, uniformity(mine), context)


def tiles(layer: Layer, begin: int) -> Iterator[tuple[int, int]]:
    """First and last row of each tile, from the row `begin` to the end."""
    first = begin
    while first < layer.length:
        rows = max(1, NUMBERS // layer.numbers_a_key() // layer.length)
        last = min(first + rows, layer.length) - 1
        yield first, last
        first = last + 1


def squares(difference: Tensor) -> Tensor:
    """The sum of squares a head, over the entries that both maps have: (heads,)."""
    return torch.where(difference.isfinite(), difference, 0.0).square_().sum(dim=(1, 2))
