"""The values behind a picture: the maps of all heads of a layer, at one size of cells, and what is measured on them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from relpos.maps.computing import one_thread
from relpos.maps.diagonals import Diagonals, Share, context_dependence, spread, uniformity
from relpos.maps.head_values import all_heads
from relpos.maps.layer import Layer, Quantity
from relpos.maps.values import Cells, HeadValues, reduce_block

PIXELS = 512  # most cells per side: more than a panel has dots at 200 dots per inch
NUMBERS = 2**18  # entries of a head that are materialised at a time: 2 MB in float64, which fit into the caches
POINTS, ALL = 512, 2048  # distances of a profile whose diagonals are read one by one; up to which length all of them


@dataclass(frozen=True)
class Map:
    """The map of every head of one layer, reduced to the cells of a page, and what was measured on all its entries."""

    layer: int
    show: Quantity
    causal: bool
    length: int
    cell: int  # entries per side of a cell
    low: NDArray[np.float32]  # (heads, cells, cells): minimum, mean and maximum of each; NaN where no key is seen
    mean: NDArray[np.float32]
    high: NDArray[np.float32]
    distances: NDArray[np.int64]  # query − key: all, or some of those of a long map
    profile: NDArray[np.float32]  # (3, heads, distances): minimum, mean and maximum at each distance; NaN likewise
    uniformity: Share
    context: Share | None  # None if there was no second input to compare with

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.mean)

    def range(self, head: int | None = None) -> tuple[float, float]:
        """The smallest and the largest value, of one head (0 is the first) or of all."""
        chosen = slice(None) if head is None else head
        return float(np.nanmin(self.low[chosen])), float(np.nanmax(self.high[chosen]))


def map_of_layer(
    layer: Layer,
    show: Quantity,
    other: Layer | None = None,
    pixels: int = PIXELS,
    progress: Callable[[float], None] = lambda done: None,
) -> Map:
    """The map of a layer on an input.

    Args:
        layer: The layer.
        show: Which values: bias, scores or weights.
        other: The same layer on another input of the same length, for the context dependence.
        pixels: Most cells per side.
        progress: Called with the completed fraction.
    """
    others = None if other is None else all_heads(other, show)
    return compute_map(all_heads(layer, show), show, layer.number, others, pixels, progress)


@torch.no_grad()
def compute_map(
    heads: Sequence[HeadValues],
    show: Quantity,
    number: int = 1,
    others: Sequence[HeadValues] | None = None,
    pixels: int = PIXELS,
    progress: Callable[[float], None] = lambda done: None,
) -> Map:
    """The map of some heads: from their forms where that is possible, else in one pass over their entries.

    Args:
        heads: The values of each head.
        show: What they are: bias, scores or weights.
        number: Number of the layer; 1 is the first.
        others: The values of the same heads on another input, for the context dependence.
        pixels: Most cells per side.
        progress: Called with the completed fraction.
    """
    length, causal = heads[0].length, all(head.causal for head in heads)
    size = math.ceil(length / pixels)
    closed = size > 1 and all(head.closed for head in [*heads, *(others or [])])
    apart = [head.squared_difference(other) for head, other in zip(heads, others or [], strict=False) if closed]
    known = [x for x in apart if x is not None]
    if closed and len(known) == len(apart):
        with one_thread():  # many small sums
            cells, diagonals, compared = _from_forms(heads, others, size, progress)
        difference = torch.tensor(known, dtype=torch.float64)
    else:
        cells, diagonals, compared, difference = _pass_over_entries(heads, others, causal, size, progress)
    low, mean, high = torch.stack([head.planes for head in cells], dim=1).numpy()
    distances = torch.arange(0 if causal else 1 - length, length)
    if diagonals.extremes:
        profile = diagonals.profile
    else:
        distances = distances if length <= ALL else torch.tensor(spread(int(distances[0]), length - 1, POINTS))
        profile = torch.stack([head.profile(distances) for head in heads], dim=1)
    context = None if compared is None else context_dependence(diagonals, compared, difference)
    return Map(
        number,
        show,
        causal,
        length,
        size,
        low,
        mean,
        high,
        distances.numpy(),
        profile.float().numpy(),
        uniformity(diagonals),
        context,
    )


def _from_forms(
    heads: Sequence[HeadValues], others: Sequence[HeadValues] | None, size: int, progress: Callable[[float], None]
) -> tuple[list[Cells], Diagonals, Diagonals | None]:
    """Cells and diagonals of the heads, and the diagonals of the others."""
    cells = []
    side = math.ceil(heads[0].length / size)
    for place, head in enumerate(heads):
        cells.append(head.cells(0, side, 0, side, size))
        progress((place + 1) / len(heads))
    diagonals = Diagonals.joined([head.diagonals() for head in heads])
    return cells, diagonals, None if others is None else Diagonals.joined([other.diagonals() for other in others])


def _pass_over_entries(
    heads: Sequence[HeadValues],
    others: Sequence[HeadValues] | None,
    causal: bool,
    size: int,
    progress: Callable[[float], None],
) -> tuple[list[Cells], Diagonals, Diagonals | None, torch.Tensor]:
    """Cells and diagonals of the heads, the diagonals of the others, and the squared differences between them."""
    length = heads[0].length
    side = math.ceil(length / size)
    cells = [Cells.empty(side, side) for _ in heads]
    diagonals = [Diagonals(1, length, causal) for _ in heads]
    compared = [Diagonals(1, length, causal) for _ in others or []]
    difference = torch.zeros(len(heads), dtype=torch.float64)
    for first, end in max(heads, key=lambda head: head.together).row_blocks(NUMBERS, size):
        right = end if causal else length
        blocks = [head.block(first, end, 0, right).double() for head in heads]
        for place, values in enumerate(blocks):
            rows = math.ceil(end / size) - first // size
            cells[place].put(first // size, 0, reduce_block(values, rows, math.ceil(right / size), size))
            diagonals[place].add(values[None], first)
        for place, other in enumerate(others or []):
            values = other.block(first, end, 0, right).double()
            compared[place].add(values[None], first)
            difference[place] += (values - blocks[place]).nan_to_num(0.0, 0.0, 0.0).square_().sum()
        progress((end / length) ** 2 if causal else end / length)
    joined = Diagonals.joined(compared) if others is not None else None
    return cells, Diagonals.joined(diagonals), joined, difference
