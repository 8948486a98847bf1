"""The map of one head in tiles: on demand from its values, or from a pyramid that is built once, in bounded memory."""

import threading
from contextlib import nullcontext
from functools import cached_property

import torch
from torch import Tensor

from relpos.maps.computing import all_cores
from relpos.maps.values import ENTRIES, Cells, HeadValues

TILE = 256  # cells per side of a tile
DIRECT = 3  # the highest level whose tiles are computed entry by entry: 2048 × 2048 entries
KEPT = 512  # most cells per side of the lowest level of a pyramid, where tiles of a lower level can be computed
ROW_POINTS = 4096  # most values of a row


class HeadMap:
    """The map of one head.

    A tile of level z has 256 × 256 cells of 2^z × 2^z entries. Level 0 has the entries themselves, and the top level is
    the first that fits into one tile.

    Args:
        values: Its values.
    """

    def __init__(self, values: HeadValues) -> None:
        self.values, self.length = values, values.length
        self.top = 0
        while self.length > TILE << self.top:
            self.top += 1
        self.base = DIRECT + 1  # the lowest level of the pyramid
        while self.cells_at(self.base) > KEPT:
            self.base += 1
        self._lock = threading.Lock()
        self._levels: dict[int, Cells] = {}

    def cells_at(self, level: int) -> int:
        """Cells per side at a level."""
        return -(-self.length >> level) if level else self.length

    def tile(self, level: int, row: int, column: int) -> Tensor:
        """Minimum, mean and maximum of every cell of a tile: (3, 256, 256), NaN where nothing is seen.

        Raises:
            ValueError: There is no such tile.
        """
        side = self.cells_at(level) if 0 <= level <= self.top else 0
        tiles = -(-side // TILE)
        if not (0 <= level <= self.top and 0 <= row < tiles and 0 <= column < tiles):
            raise ValueError(
                f"there is no tile {row}, {column} at level {level}: {self.length} tokens have the levels 0 to "
                f"{self.top}, and level {min(max(level, 0), self.top)} has "
                f"{-(-self.cells_at(min(max(level, 0), self.top)) // TILE)} tiles per side."
            )
        rows, columns = (min(TILE, side - TILE * place) for place in (row, column))
        planes = self.cells(level, TILE * row, rows, TILE * column, columns).planes
        out = torch.full((3, TILE, TILE), torch.nan)
        out[:, :rows, :columns] = planes
        return out

    def cells(self, level: int, row: int, rows: int, column: int, columns: int) -> Cells:
        """Some cells of a level: from the values, or from the pyramid."""
        if level < self.top and (level < self.base or self.values.closed):
            return self.values.cells(row, rows, column, columns, 1 << level)
        return self.grid(level).part(row, rows, column, columns)

    def level_of(self, cells: int) -> int:
        """The finest level with at most so many cells per side."""
        level = 0
        while self.cells_at(level) > cells:
            level += 1
        return level

    def grid(self, level: int) -> Cells:
        """All cells of a level of the pyramid; they are computed once."""
        with self._lock:
            if level in self._levels:
                return self._levels[level]
            lowest = self.base if level >= self.base and not self.values.closed else level
            if lowest not in self._levels:
                side = self.cells_at(lowest)
                with nullcontext() if self.values.closed else all_cores():
                    self._levels[lowest] = self.values.cells(0, side, 0, side, 1 << lowest)
            for above in range(lowest + 1, level + 1):
                if above not in self._levels:
                    self._levels[above] = self._levels[above - 1].halved()
            return self._levels[level]

    @cached_property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest value."""
        sums = self.grid(self.top)
        return float(sums.low.amin()) + 0.0, float(sums.high.amax()) + 0.0  # no −0

    @cached_property
    def range_without_sink(self) -> tuple[float, float]:
        """The smallest and the largest value without the first key."""
        if self.values.closed or self.length <= TILE:
            return self.values.extremes_without_first_key()
        level = min(self.base, self.top)
        sums, size = self.grid(level), 1 << level
        low, high = float(sums.low[:, 1:].amin()), float(sums.high[:, 1:].amax())
        rows = max(1, ENTRIES // size)
        for first in range(0, self.length, rows):  # the other keys of the first column of cells
            values = self.values.block(first, min(first + rows, self.length), 1, size)
            seen = values.isfinite()
            low = min(low, float(torch.where(seen, values, torch.inf).amin()))
            high = max(high, float(torch.where(seen, values, -torch.inf).amax()))
        return low, high

    def value(self, query: int, key: int) -> float | None:
        """One entry; None if the query does not see the key."""
        self._check("query", query)
        self._check("key", key)
        value = float(self.values.block(query, query + 1, key, key + 1)[0, 0])
        return value if torch.isfinite(torch.tensor(value)) else None

    def row(self, query: int) -> tuple[int, Tensor]:
        """All values of a query: how many keys a point stands for, and (3, points) minimum, mean and maximum."""
        self._check("query", query)
        values = self.values.block(query, query + 1, 0, self.length)[0]
        step = -(-self.length // ROW_POINTS)
        padded = torch.nn.functional.pad(values, (0, -len(values) % step), value=torch.nan).view(-1, step)
        seen = padded.isfinite()
        low = torch.where(seen, padded, torch.inf).amin(dim=1)
        high = torch.where(seen, padded, -torch.inf).amax(dim=1)
        mean = torch.where(seen, padded, 0.0).double().sum(dim=1) / seen.sum(dim=1)
        return step, torch.stack([low, mean.float(), high]).masked_fill(~seen.any(dim=1), torch.nan)

    def _check(self, name: str, place: int) -> None:
        if not 0 <= place < self.length:
            raise ValueError(f"there is no {name} {place}: the positions are 0 to {self.length - 1}.")

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps."""
        return self.values.nbytes + sum(sums.nbytes for sums in list(self._levels.values()))
