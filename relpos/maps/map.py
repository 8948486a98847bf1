"""The values behind a picture: the map of a layer, computed a few rows at a time, never length × length at once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relpos.forms.bias import Form, terms
from relpos.maps.cells import PIXELS, Cells
from relpos.maps.diagonals import Diagonals, Share, context_dependence, uniformity
from relpos.maps.layers import Layer, Values
from relpos.maps.scaled_maps import ScaledMap, has_pieces

NUMBERS = 2**18  # values that are materialised at a time: 2 MB in float64, which fit into the caches


@dataclass(frozen=True)
class Map:
    """The map of every head of one layer, reduced to the cells of a page, and what was measured on all its entries."""

    layer: int
    show: Values
    causal: bool
    length: int
    cell: int  # entries per side of a cell
    low: NDArray[np.float32]  # (heads, cells, cells): minimum, mean and maximum of each; NaN where no key is seen
    mean: NDArray[np.float32]
    high: NDArray[np.float32]
    profile: NDArray[np.float32]  # (3, heads, distances): minimum, mean and maximum at each distance; NaN likewise
    uniformity: Share
    context: Share | None  # None if there was no second input to compare with

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.mean)

    @property
    def distances(self) -> NDArray[np.int64]:
        """The distances query − key of the profile: 0…length − 1, or from −(length − 1) on in both directions."""
        return np.arange(0 if self.causal else 1 - self.length, self.length)

    def range(self, head: int | None = None) -> tuple[float, float]:
        """The smallest and the largest value, of one head (0 is the first) or of all."""
        chosen = slice(None) if head is None else head
        return float(np.nanmin(self.low[chosen])), float(np.nanmax(self.high[chosen]))


@torch.no_grad()
def compute_map(
    layer: Layer,
    show: Values,
    other: Layer | None = None,
    pixels: int = PIXELS,
    progress: Callable[[float], None] = lambda done: None,
) -> Map:
    """Compute the map of a layer.

    Args:
        layer: The layer on an input.
        show: Which values: bias, scores or weights.
        other: The same layer on another input of the same length, for the context dependence.
        pixels: Most cells per side.
        progress: Called with the completed fraction.

    Returns:
        The map.
    """
    heads, length, causal = layer.heads, layer.length, layer.causal
    cells = Cells(heads, length, pixels)
    diagonals, compared = Diagonals(heads, length, causal), Diagonals(heads, length, causal)
    difference = torch.zeros(heads, dtype=torch.float64)
    long = cells.size > 1 and show == "bias" and (other is None or equal_forms(layer.form, other.form))
    if long and layer.by_distance:
        values = bias_by_distance(layer)
        cells.fill_from_distances(values)
        diagonals.fill_from_distances(values)
        compared = diagonals
    elif long and causal and has_pieces(layer.form):
        scaled = ScaledMap(layer.form)  # type: ignore[arg-type]
        scaled.fill_cells(cells, progress)
        scaled.fill_diagonals(diagonals)
        compared = diagonals
    else:
        for first, last in tiles(layer):
            values = layer.rows(show, first, last).double()
            cells.add(values, first)
            diagonals.add(values, first)
            if other is not None:
                other_values = other.rows(show, first, last).double()
                compared.add(other_values, first)
                difference += squares(values - other_values)
            done = (last + 1) / length
            progress(done**2 if causal else done)
    low, mean, high = cells.finished()
    unseen = diagonals.count == 0  # distances beyond a sliding window
    profile = (
        torch.stack([diagonals.low, diagonals.mean, diagonals.high]).masked_fill(unseen, torch.nan).float().numpy()
    )
    context = None if other is None else context_dependence(diagonals, compared, difference)
    uniform = uniformity(diagonals)
    return Map(layer.number, show, causal, length, cells.size, low, mean, high, profile, uniform, context)


def bias_by_distance(layer: Layer) -> Tensor:
    """The bias of a layer that is a function of the distance, by distance: (heads, distances) in float64."""
    last = layer.length - 1
    backward = layer.rows("bias", last, last)[:, 0].double().flip(-1)  # (heads, length): the distances 0…length − 1
    if layer.causal:
        return backward
    forward = layer.rows("bias", 0, 0)[:, 0].double().flip(-1)  # (heads, length): −(length − 1)…0
    return torch.cat([forward[:, :-1], backward], dim=-1)


def equal_forms(first: Form | None, second: Form | None) -> bool:
    """Whether two biases have the same forms with equal tensors."""
    pairs = zip(terms(first), terms(second), strict=False)
    alike = len(terms(first)) == len(terms(second)) and all(type(a) is type(b) for a, b in pairs)
    ours, theirs = ([x for part in terms(form) for _, x in part.tensors()] for form in (first, second))
    return alike and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def tiles(layer: Layer) -> Iterator[tuple[int, int]]:
    """First and last row of each tile."""
    rows = max(1, NUMBERS // layer.values_per_entry() // layer.length)
    for first in range(0, layer.length, rows):
        yield first, min(first + rows, layer.length) - 1


def squares(difference: Tensor) -> Tensor:
    """The sum of squares per head, over the entries that both maps have: (heads,)."""
    return torch.where(difference.isfinite(), difference, 0.0).square_().sum(dim=(1, 2))
