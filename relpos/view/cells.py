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
        heads, rows, keys = values.shape
        columns = math.ceil(keys / self.size)
        padded = F.pad(values, (0, columns * self.size - keys), value=torch.nan)
        cells = padded.view(heads, rows, columns, self.size)
        seen = cells.isfinite()
        row = (torch.arange(keys - rows, keys) // self.size)[None, :, None].expand(heads, rows, columns)  # of cells

        def gather(kept: Tensor, found: Tensor, how: str) -> None:
            kept[:, :, :columns].scatter_reduce_(1, row, found, how)

        gather(self.low, torch.where(seen, cells, torch.inf).amin(dim=-1), "amin")
        gather(self.high, torch.where(seen, cells, -torch.inf).amax(dim=-1), "amax")
        gather(self.total, torch.where(seen, cells, 0.0).sum(dim=-1), "sum")
        gather(self.count, seen.sum(dim=-1).double(), "sum")

    def repeat_along_diagonals(self) -> None:
        """Fill all rows of whole cells from the last such row, for a map that is a function of the distance alone."""
        last = self.length // self.size - 1
        for kept in (self.low, self.high, self.total, self.count):
            for row in range(last):
                kept[:, row, : row + 1] = kept[:, last, last - row : last + 1]

    def finished(self) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        """Minimum, mean and maximum of every cell: (heads, side, side), NaN where nothing is seen."""
        empty = self.count == 0
        found = (self.low, self.total / self.count, self.high)
        low, mean, high = (x.masked_fill(empty, torch.nan).float().numpy() for x in found)
        return low, mean, high
