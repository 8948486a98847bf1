"""A map reduced to the cells of a page: the minimum, mean and maximum of each, accumulated a few rows at a time."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

PIXELS = 512  # most cells per side: more than a panel has dots at 200 dots per inch


class Cells:
    """Square cells of `size` × `size` entries, counted from the top left; the last ones may be cut off."""

    def __init__(self, heads: int, length: int, pixels: int = PIXELS) -> None:
        self.length = length
        self.size = math.ceil(length / pixels)
        side = math.ceil(length / self.size)
        self.low = torch.full((heads, side, side), torch.inf, dtype=torch.float64)
        self.high = torch.full((heads, side, side), -torch.inf, dtype=torch.float64)
        self.total, self.count = torch.zeros(2, heads, side, side, dtype=torch.float64)

    def add(self, values: Tensor, first_row: int) -> None:
        """Add the rows from `first_row` on: (heads, rows, keys) in float64, NaN where a key is not seen."""
        _, rows, keys = values.shape
        seen = values.isfinite()
        low, high = torch.where(seen, values, torch.inf), torch.where(seen, values, -torch.inf)
        total = torch.where(seen, values, 0.0)
        for row in range(first_row // self.size, math.ceil((first_row + rows) / self.size)):
            inside = slice(max(0, row * self.size - first_row), (row + 1) * self.size - first_row)
            here = (slice(None), row, slice(math.ceil(keys / self.size)))
            # Rows are reduced before columns, along memory, which is faster.
            self.low[here] = self.low[here].minimum(self._columns(low[:, inside].amin(dim=1), torch.inf).amin(dim=-1))
            self.high[here] = self.high[here].maximum(
                self._columns(high[:, inside].amax(dim=1), -torch.inf).amax(dim=-1)
            )
            self.total[here] += self._columns(total[:, inside].sum(dim=1)).sum(dim=-1)
            self.count[here] += self._columns(seen[:, inside].sum(dim=1)).sum(dim=-1)

    def _columns(self, x: Tensor, fill: float = 0) -> Tensor:
        """Group the keys of a row (heads, keys) by cell: (heads, columns, size)."""
        return F.pad(x, (0, -x.shape[-1] % self.size), value=fill).view(len(x), -1, self.size)

    def fill_from_distances(self, values: Tensor) -> None:
        """Fill all cells of a map that is a function of the distance alone.

        Args:
            values: (heads, distances) in float64: the distances 0…length − 1 of a causal map, or −(length − 1)…length −
                1 of a map in both directions.
        """
        side = self.low.shape[-1]
        causal = values.shape[-1] == self.length
        nearest = 0 if causal else 1 - side  # cells that a column is apart from its row: row − column, at least
        rest = self.length - (side - 1) * self.size  # rows and columns of the last cells
        for rows, first_row in ((self.size, 0), (rest, side - 1)):  # the last row replaces what the first pass wrote
            reduced = self._by_cells_apart(values, nearest, rows, self.size)
            for row in range(first_row, side):
                columns = row + 1 if causal else side
                apart = slice(row - (columns - 1) - nearest, row + 1 - nearest)
                for kept, new in zip((self.low, self.high, self.total, self.count), reduced, strict=True):
                    kept[:, row, :columns] = new[:, apart].flip(-1)
            if causal or rest == self.size:  # causal: only the last cell of the last row is cut, by the diagonal anyway
                continue
            reduced = self._by_cells_apart(values, nearest, rows, rest)
            for kept, new in zip((self.low, self.high, self.total, self.count), reduced, strict=True):
                kept[:, first_row:, -1] = new[:, first_row:side]

    def _by_cells_apart(self, values: Tensor, nearest: int, rows: int, columns: int) -> tuple[Tensor, ...]:
        """Minimum, maximum, sum and count of cells of rows × columns entries, by how many cells apart they are.

        A cell that is d = nearest, nearest + 1, … cells from the diagonal has the distances from d · size − (columns −
        1) to d · size + rows − 1, those in the middle most often. Each result is (heads, cells apart).
        """
        side = self.low.shape[-1]
        wide = rows + columns - 1
        zero = values.shape[-1] - self.length  # column of distance 0
        padded = F.pad(values, (columns - 1 - nearest * self.size - zero, wide), value=torch.nan)
        around = padded.unfold(-1, wide, self.size)[:, : side - nearest]  # (heads, cells apart, distances)
        place = torch.arange(wide)
        often = torch.stack([place + 1, wide - place]).amin(dim=0).clamp(max=min(rows, columns))
        seen = around.isfinite()
        low = torch.where(seen, around, torch.inf).amin(dim=-1)
        high = torch.where(seen, around, -torch.inf).amax(dim=-1)
        return low, high, (torch.where(seen, around, 0.0) * often).sum(dim=-1), (seen * often).sum(dim=-1)

    def finished(self) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        """Minimum, mean and maximum of every cell: (heads, side, side), NaN where no key is seen."""
        empty = self.count == 0
        sums = (self.low, self.total / self.count, self.high)
        low, mean, high = (x.masked_fill(empty, torch.nan).float().numpy() for x in sums)
        return low, mean, high
