"""Maps: of all heads of a layer at the size of a page, with what is measured on them; and of one head in tiles."""

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relpos.maps.diagonals import Diagonals, Share, context_dependence, spread, uniformity
from relpos.maps.head_values import all_heads
from relpos.maps.layer import Layer, Quantity
from relpos.maps.values import Cells, HeadValues, all_cores, one_thread, reduce_block

PIXELS = 512  # most cells per side: more than a panel has dots at 200 dots per inch
NUMBERS = 2**18  # entries of a head that are materialised at a time: 2 MB in float64, which fit into the caches
PER_BLOCK = 2**14  # entries that take as long as the part of a block's time that does not depend on its size
POINTS, ALL = 512, 2048  # distances of a profile whose diagonals are read one by one; up to which length all of them
TILE = 256  # cells per side of a tile
DIRECT = 3  # the highest level whose tiles are computed entry by entry: 2048 × 2048 entries
KEPT = 512  # most cells per side of the lowest level of a pyramid, where tiles of a lower level can be computed
ROW_POINTS = 4096  # most values of a row
SAMPLED = 8  # rows of a head from which the colour map of a page is decided
# A head whose values differ by less is practically constant: a constant cancels in the softmax, and between two keys so
# small a difference changes the ratio of the weights by a factor of less than e^0.05, 5 %.
FLAT_RANGE = 0.05
LEAST_SHARE = 0.05  # of the weight of uniform attention, 1 / length: all weights below it have the same colour
# The smaller side of a range from which on a head may have colours centred on 0, as a share of the larger side: at a
# quarter, at least 5/8 of the colours are used.
LEAST_SIDE = 0.25
# The colours of scores span the percentiles of the cells, and on both sides this share of what lies between them.
PERCENTILES, BEYOND = (1, 99), 0.1
ColourMap = Literal["sequential", "diverging", "weights"]
Extend = Literal["neither", "min", "max", "both"]  # ends of a colour bar with an arrow, as matplotlib names them


@dataclass(frozen=True)
class ColourScale:
    """The values that the colours of a map stand for: logarithmic for weights, else linear.

    Values below `low` or above `high` have the colour of the nearer end.
    """

    low: float
    high: float
    log: bool
    signed: bool  # whether 0 is the middle
    extend: Extend = "neither"  # where there are values beyond `low` and `high`

    @staticmethod
    def of(low: float, high: float, signed: bool, typical: tuple[float, float] | None = None) -> "ColourScale":
        """The scale of values from `low` to `high`, or of a smaller range of `typical` values.

        `signed` is decided once per page, by `both_signs`.
        """
        first, last = typical or (low, high)
        if signed:
            first, last = min(first, -last), max(last, -first)  # an arrow has the first or the last colour
        ends: dict[tuple[bool, bool], Extend] = {(True, True): "both", (True, False): "min", (False, True): "max"}
        extend = ends.get((low < first, high > last), "neither")
        return ColourScale(max(low, first) + 0.0, min(high, last) + 0.0, False, signed, extend)  # no −0

    @staticmethod
    def of_weights(low: float, high: float, length: int) -> "ColourScale":
        """The scale of weights from `low` to `high` over `length` tokens.

        What is dark depends on the length: uniform attention gives each of n tokens 1 / n.
        """
        least = LEAST_SHARE / length
        return ColourScale(max(low, least), max(high, 2 * least), True, False, "min" if low < least else "neither")

    @property
    def colour_map(self) -> ColourMap:
        return "weights" if self.log else "diverging" if self.signed else "sequential"

    @property
    def ends(self) -> tuple[float, float]:
        """The values of the first and the last colour.

        They span at least `FLAT_RANGE`, so that a head that is practically constant looks constant. Where one sign
        dominates, the largest value is the lightest.
        """
        if self.log:
            return self.low, self.high
        if self.signed:
            most = max(-self.low, self.high, FLAT_RANGE / 2)
            return -most, most
        return min(self.low, self.high - FLAT_RANGE), self.high


def both_signs(ranges: Sequence[tuple[float, float]]) -> bool:
    """Whether the heads of a page with these ranges are drawn in colours centred on 0: all of them, or none.

    Centred colours need both signs in every head; a head of one sign would have half of them, or one. Otherwise all
    heads get the colours of one sign: 0 is not special to a softmax. Heads that are practically 0 look so in both.
    """
    others = [(low, high) for low, high in ranges if max(-low, high) > FLAT_RANGE / 2] or ranges
    return all(min(-low, high) > LEAST_SIDE * max(-low, high) for low, high in others)


def typical_range(cells: NDArray[Any], full: tuple[float, float], show: str) -> tuple[float, float]:
    """The range of the colours of some cells: of scores without rare extremes, which would make all others look alike.

    `full` is the range of the entries.
    """
    if show != "scores":
        return full
    first, last = np.percentile(cells[np.isfinite(cells)], PERCENTILES)
    beyond = BEYOND * (last - first)
    return max(full[0], float(first - beyond)), min(full[1], float(last + beyond))


def sampled_range(values: HeadValues, show: str) -> tuple[float, float]:
    """The range of the colours of a head, from some of its rows: quick at any length, exact for a bias by distance."""
    places = sorted({round((values.length - 1) * row / SAMPLED) for row in range(1, SAMPLED + 1)}, reverse=True)
    rows = [values.block(row, row + 1, 0, row + 1 if values.causal else values.length) for row in places]
    entries = torch.cat([row.flatten() for row in rows]).double().numpy()
    entries = entries[np.isfinite(entries)]
    if not len(entries):
        return 0.0, 0.0
    return typical_range(entries, (float(entries.min()), float(entries.max())), show)


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
        return len(self.mean)

    def range(self, head: int | None = None) -> tuple[float, float]:
        """The smallest and the largest value, of one head (0 is the first) or of all."""
        chosen = slice(None) if head is None else head
        return float(np.nanmin(self.low[chosen])), float(np.nanmax(self.high[chosen]))

    def typical_range(self, head: int | None = None) -> tuple[float, float]:
        """The range of the colours: of scores without rare extremes, which would make all others look alike."""
        return typical_range(self.mean[slice(None) if head is None else head], self.range(head), self.show)


def map_of_layer(
    layer: Layer,
    show: Quantity,
    other: Layer | None = None,
    pixels: int = PIXELS,
    progress: Callable[[float], None] = lambda done: None,
) -> Map:
    """The map of a layer; `other` is the same layer on another input, for the context dependence."""
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
    """The map of some heads: from their forms where that is possible, else in one pass over their entries."""
    length, causal = heads[0].length, all(head.causal for head in heads)
    size = math.ceil(length / pixels)
    closed = size > 1 and all(head.closed for head in [*heads, *(others or [])])
    apart = [head.squared_difference(other) for head, other in zip(heads, others or [], strict=False) if closed]
    known = [x for x in apart if x is not None]
    if closed and len(known) == len(apart):
        side, cells = math.ceil(length / size), []
        with one_thread():  # many small sums
            for place, head in enumerate(heads):
                cells.append(head.cells(0, side, 0, side, size))
                progress((place + 1) / len(heads))
            diagonals, *compared = (
                Diagonals.joined([head.diagonals() for head in group]) for group in (heads, others) if group
            )
        difference = torch.tensor(known, dtype=torch.float64)
    else:
        cells, diagonals, compared, difference = _pass_over_entries(heads, others or [], causal, size, progress)
    low, mean, high = torch.stack([head.planes for head in cells], dim=1).numpy()
    distances = torch.arange(0 if causal else 1 - length, length)
    if diagonals.extremes:
        profile = diagonals.profile
    else:
        distances = distances if length <= ALL else torch.tensor(spread(int(distances[0]), length - 1, POINTS))
        profile = torch.stack([head.profile(distances) for head in heads], dim=1)
    context = context_dependence(diagonals, compared[0], difference) if compared else None
    by_distance, measured = (distances.numpy(), profile.float().numpy()), (uniformity(diagonals), context)
    return Map(number, show, causal, length, size, low, mean, high, *by_distance, *measured)


def _pass_over_entries(
    heads: Sequence[HeadValues],
    others: Sequence[HeadValues],
    causal: bool,
    size: int,
    progress: Callable[[float], None],
) -> tuple[list[Cells], Diagonals, list[Diagonals], Tensor]:
    """Cells and diagonals of the heads, the diagonals of the others, and the squared differences between them."""
    length = heads[0].length
    side = math.ceil(length / size)
    cells = [Cells.empty(side, side) for _ in heads]
    diagonals = [Diagonals(1, length, causal) for _ in heads]
    compared = [Diagonals(1, length, causal) for _ in others]
    difference = torch.zeros(len(heads), dtype=torch.float64)
    slowest, done = max(heads, key=lambda head: head.together), 0
    total = sum(_work(first, end, end if causal else length) for first, end in slowest.row_blocks(NUMBERS, size))
    for first, end in slowest.row_blocks(NUMBERS, size):
        right = end if causal else length
        blocks = [head.block(first, end, 0, right).double() for head in heads]
        for place, values in enumerate(blocks):
            rows = math.ceil(end / size) - first // size
            cells[place].put(first // size, 0, reduce_block(values, rows, math.ceil(right / size), size))
            diagonals[place].add(values[None], first)
        for place, other in enumerate(others):
            values = other.block(first, end, 0, right).double()
            compared[place].add(values[None], first)
            difference[place] += (values - blocks[place]).nan_to_num(0.0, 0.0, 0.0).square_().sum()
        done += _work(first, end, right)
        progress(done / total)
    return cells, Diagonals.joined(diagonals), [Diagonals.joined(compared)] if compared else [], difference


def _work(first: int, end: int, keys: int) -> int:
    """The time of a block of rows, in entries."""
    return (end - first) * keys + PER_BLOCK


def offset_map(number: int, table: Tensor) -> Map:
    """The map of a table (heads, rows, columns) of a layer, with offset 0 in the middle; NaN beside a narrow one."""
    heads, rows, columns = table.shape
    side = max(rows, columns)
    values = np.full((heads, side, side), np.nan, dtype=np.float32)
    top, left = (side - rows) // 2, (side - columns) // 2
    values[:, top : top + rows, left : left + columns] = table.float().cpu().numpy()
    nothing = Share([None] * heads, None)  # diagonals of offsets mean nothing
    distances, profile = np.empty(0, np.int64), np.empty((3, heads, 0), np.float32)
    return Map(number, "bias", False, side, 1, values, values, values, distances, profile, nothing, None)


class HeadMap:
    """The map of one head in tiles: on demand from its values, or from a pyramid that is built once, in bounded memory.

    A tile of level z has 256 × 256 cells of 2^z × 2^z entries. Level 0 has the entries themselves, and the top level is
    the first that fits into one tile.
    """

    def __init__(self, values: HeadValues) -> None:
        self.values, self.length = values, values.length
        self.top = self.level_of(TILE)
        self.base = max(DIRECT + 1, self.level_of(KEPT))  # the lowest level of the pyramid
        self._lock = threading.Lock()
        self._levels: dict[int, Cells] = {}

    def cells_at(self, level: int) -> int:
        """Cells per side at a level."""
        return -(-self.length >> level) if level else self.length

    def level_of(self, cells: int) -> int:
        """The finest level with at most this many cells per side."""
        level = 0
        while self.cells_at(level) > cells:
            level += 1
        return level

    def tile(self, level: int, row: int, column: int) -> Tensor:
        """Minimum, mean and maximum of every cell of a tile: (3, 256, 256), NaN where nothing is seen."""
        side = self.cells_at(min(max(level, 0), self.top))
        tiles = -(-side // TILE)
        if not (0 <= level <= self.top and 0 <= row < tiles and 0 <= column < tiles):
            raise ValueError(
                f"there is no tile {row}, {column} at level {level}: {self.length} tokens have the levels 0 to "
                f"{self.top}, and level {min(max(level, 0), self.top)} has {tiles} tiles per side."
            )
        rows, columns = (min(TILE, side - TILE * place) for place in (row, column))
        out = torch.full((3, TILE, TILE), torch.nan)
        out[:, :rows, :columns] = self.cells(level, TILE * row, rows, TILE * column, columns).planes
        return out

    def cells(self, level: int, row: int, rows: int, column: int, columns: int) -> Cells:
        """Some cells of a level: from the values, or from the pyramid."""
        if level < self.top and (level < self.base or self.values.closed):
            return self.values.cells(row, rows, column, columns, 1 << level)
        return self.grid(level).part(row, rows, column, columns)

    def grid(self, level: int) -> Cells:
        """All cells of a level of the pyramid; they are computed once."""
        with self._lock:
            if level in self._levels:
                return self._levels[level]
            lowest = self.base if level >= self.base and not self.values.closed else level
            if lowest not in self._levels:
                side = self.cells_at(lowest)
                small = self.length <= TILE << DIRECT  # several threads would wait long for busy cores
                with nullcontext() if self.values.closed or small else all_cores():
                    self._levels[lowest] = self.values.cells(0, side, 0, side, 1 << lowest)
            for above in range(lowest + 1, level + 1):
                if above not in self._levels:
                    self._levels[above] = self._levels[above - 1].halved()
            return self._levels[level]

    @cached_property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest value."""
        cells = self.grid(self.top)
        return float(cells.low.amin()) + 0.0, float(cells.high.amax()) + 0.0  # no −0

    def typical_range(self, show: str) -> tuple[float, float]:
        """The range of the colours: of scores without rare extremes."""
        return (
            self.range if show != "scores" else typical_range(self.grid(self.top).planes[1].numpy(), self.range, show)
        )

    @cached_property
    def range_without_sink(self) -> tuple[float, float]:
        """The smallest and the largest value without the first key."""
        if self.values.closed or self.length <= TILE:
            return self.values.extremes_without_first_key()
        level = min(self.base, self.top)
        cells = self.grid(level)
        low, high = self.values.extremes(1, 1 << level)  # the other keys of the first column of cells
        return min(low, float(cells.low[:, 1:].amin())), max(high, float(cells.high[:, 1:].amax()))

    def value(self, query: int, key: int) -> float | None:
        """One entry; None if the query does not see the key."""
        self._check("query", query)
        self._check("key", key)
        value = float(self.values.block(query, query + 1, key, key + 1)[0, 0])
        return value if math.isfinite(value) else None

    def row(self, query: int) -> tuple[int, Tensor]:
        """All values of a query: how many keys a point stands for, and (3, points) minimum, mean and maximum."""
        self._check("query", query)
        step = -(-self.length // ROW_POINTS)
        values = self.values.block(query, query + 1, 0, self.length)
        return step, reduce_block(values, 1, -(-self.length // step), step).planes[:, 0]

    def _check(self, name: str, place: int) -> None:
        if not 0 <= place < self.length:
            raise ValueError(f"there is no {name} {place}: the positions are 0 to {self.length - 1}.")

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps."""
        return self.values.nbytes + sum(x.nbytes for cells in list(self._levels.values()) for x in cells)
