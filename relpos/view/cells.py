"""A map reduced to the cells of a page: minimum, mean and maximum of each, gathered a few rows at a time."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

PIXELS = 512  # cells a side, at most: more than a panel of the page has dots at 200 a inch


class Cells:
    """Square cells of `size` tokens a side, from the top left; those at the end may be cut off."""

    def __init__(self, heads: int, length: int, pixels: int = PIXELS) -> None:
        self.length = length
        self.size = math.ceil(length / pixels)
        side = math.ceil(length / self.size)
        self.low = torch.full((heads, side, side), torch.inf, dtype=torch.float64)
        self.high = torch.full((heads, side, side), -torch.inf, dtype=torch.float64)
        self.total, self.count = torch.zeros(2, heads, side, side, dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        """Some rows, the last one ending on the diagonal: (heads, rows, keys) in float64, NaN where not seen."""
        _, rows, keys = values.shape
        first = keys - rows
        seen = values.isfinite()
        low, high = torch.where(seen, values, torch.inf), torch.where(seen, values, -torch.inf)
        total = torch.where(seen, values, 0.0)
        for row in range(first // self.size, math.ceil(keys / self.size)):
            inside = slice(max(0, row * self.size - first), (row + 1) * self.size - first)
            here = (slice(None), row, slice(math.ceil(keys / self.size)))
            # Rows before columns: along memory, it is quicker.
            self.low[here] = self.low[here].minimum(self._columns(low[:, inside].amin(dim=1), torch.inf).amin(dim=-1))
            self.high[here] = self.high[here].maximum(
                self._columns(high[:, inside].amax(dim=1), -torch.inf).amax(dim=-1)
            )
            self.total[here] += self._columns(total[:, inside].sum(dim=1)).sum(dim=-1)
            self.count[here] += self._columns(seen[:, inside].sum(dim=1)).sum(dim=-1)

    def _columns(self, x: Tensor, fill: float = 0) -> Tensor:
        """A row of keys (heads, keys) as columns of cells: (heads, columns, size)."""
        return F.pad(x, (0, -x.shape[-1] % self.size), value=fill).view(len(x), -1, self.size)

    def fill_from_distances(self, values: Tensor) -> None:
        """All cells of a map that is a function of the distance alone: (heads, length), in float64, by distance."""
        side = self.low.shape[-1]
        for rows in (self.size, self.length - (side - 1) * self.size):  # the last cells may have fewer, and come last
            # Cells that are d apart hold the distances around d · size, those in the middle most often.
            wide = self.size + rows - 1
            padded = F.pad(values, (self.size - 1, wide), value=torch.nan)
            around = padded.unfold(-1, wide, self.size)[:, :side]  # (heads, cells apart, distances)
            place = torch.arange(wide)
            often = torch.stack([place + 1, wide - place]).amin(dim=0).clamp(max=min(rows, self.size))
            seen = around.isfinite()
            low = torch.where(seen, around, torch.inf).amin(dim=-1)
            high = torch.where(seen, around, -torch.inf).amax(dim=-1)
            total, count = (torch.where(seen, around, 0.0) * often).sum(dim=-1), (seen * often).sum(dim=-1)
            for row in range(0 if rows == self.size else side - 1, side):
                for kept, found in ((self.low, low), (self.high, high), (self.total, total), (self.count, count)):
                    kept[:, row, : row + 1] = found[:, : row + 1].flip(-1)

    def finished(self) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        """Minimum, mean and maximum of every cell: (heads, side, side), NaN where nothing is seen."""
        empty = self.count == 0
        found = (self.low, self.total / self.count, self.high)
        low, mean, high = (x.masked_fill(empty, torch.nan).float().numpy() for x in found)
        return low, mean, high
