"""The numbers behind a picture: a layer's map, looked at a few rows at a time, never length × length at once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relpos.encodings.forms import Form, terms
from relpos.view.cells import PIXELS, Cells
from relpos.view.layers import Layer
from relpos.view.numbers import Diagonals, Share, context_dependence, uniformity
from relpos.view.piecewise import Pieces, has_pieces

NUMBERS = 2**18  # that a tile writes out at a time; 2 MB in float64, which stay near the caches


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
    long = cells.size > 1 and show == "bias" and (other is None or same(layer.form, other.form))
    if long and layer.by_distance:
        along = layer.rows("bias", length - 1, length - 1)[:, 0].double().flip(-1)  # (heads, length), by distance
        cells.fill_from_distances(along)
        mine.fill_from_distances(along)
        others = mine
    elif long and has_pieces(layer.form):
        pieces = Pieces(layer.form)  # type: ignore[arg-type]
        pieces.fill_cells(cells, progress)
        pieces.fill_diagonals(mine)
        others = mine
    else:
        for first, last in tiles(layer):
            values = layer.rows(show, first, last).double()
            cells.add(values)
            mine.add(values)
            if other is not None:
                compared = other.rows(show, first, last).double()
                others.add(compared)
                difference += squares(values - compared)
            progress(((last + 1) / length) ** 2)
    low, mean, high = cells.finished()
    profile = torch.stack([mine.low, mine.mean, mine.high]).float().numpy()
    context = None if other is None else context_dependence(mine, others, difference)
    return Map(layer.number, show, length, cells.size, low, mean, high, profile, uniformity(mine), context)


def same(one: Form | None, other: Form | None) -> bool:
    """Whether two biases are made of the same numbers."""
    pairs = zip(terms(one), terms(other), strict=False)
    alike = len(terms(one)) == len(terms(other)) and all(type(a) is type(b) for a, b in pairs)
    mine, theirs = ([x for part in terms(form) for _, x in part.tensors()] for form in (one, other))
    return alike and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def tiles(layer: Layer) -> Iterator[tuple[int, int]]:
    """First and last row of each tile."""
    rows = max(1, NUMBERS // layer.numbers_a_key() // layer.length)
    for first in range(0, layer.length, rows):
        yield first, min(first + rows, layer.length) - 1


def squares(difference: Tensor) -> Tensor:
    """The sum of squares a head, over the entries that both maps have: (heads,)."""
    return torch.where(difference.isfinite(), difference, 0.0).square_().sum(dim=(1, 2))
