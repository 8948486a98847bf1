"""Where the values of one head come from: any rectangle of its map, as entries or reduced to square cells.

A cell of size s in row r and column c holds the queries r·s … r·s + s − 1 and the keys c·s … c·s + s − 1, as far as
they exist. Nothing here materialises length × length values.
"""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.maps.deadline import check_time

ENTRIES = 2**20  # values that are materialised at a time: 4 MB in float32


class Sums(NamedTuple):
    """Cells of a map: minimum, sum and maximum of the entries that are seen, and their number, (rows, columns) each."""

    low: Tensor  # inf where nothing is seen
    total: Tensor  # float64
    high: Tensor  # −inf where nothing is seen
    seen: Tensor  # their number, float64

    def halved(self) -> "Sums":
        """The cells of twice the size."""
        low, high = (self._pairs(x, fill) for x, fill in ((self.low, torch.inf), (self.high, -torch.inf)))
        total, count = (self._pairs(x, 0.0) for x in (self.total, self.seen))
        return Sums(low.amin(dim=(1, 3)), total.sum(dim=(1, 3)), high.amax(dim=(1, 3)), count.sum(dim=(1, 3)))

    def _pairs(self, x: Tensor, fill: float) -> Tensor:
        rows, columns = x.shape
        return F.pad(x, (0, columns % 2, 0, rows % 2), value=fill).view(-(-rows // 2), 2, -(-columns // 2), 2)

    @property
    def planes(self) -> Tensor:
        """Minimum, mean and maximum in float32, NaN where nothing is seen: (3, rows, columns)."""
        empty = self.seen == 0
        planes = torch.stack([self.low.float(), (self.total / self.seen).float(), self.high.float()])
        return planes.masked_fill(empty, torch.nan) + 0.0  # no −0

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(x.nbytes for x in self)


class Source(ABC):
    """The values of one head.

    Attributes:
        length: Number of tokens.
        cheap: Whether a tile of cells of any size is computed from the form in time that its entries would not allow.
    """

    length: int
    cheap: bool = False

    @abstractmethod
    def block(self, first: int, end: int, left: int, right: int) -> Tensor:
        """The entries of the queries first…end − 1 and the keys left…right − 1, NaN where a key is not seen."""

    def cells(self, row: int, rows: int, column: int, columns: int, size: int) -> Sums:
        """Reduce the cells from `row` and `column` on.

        Args:
            row: First row of cells.
            rows: Number of rows of cells.
            column: First column of cells.
            columns: Number of columns of cells.
            size: Queries and keys per cell.
        """
        step = max(1, ENTRIES // (columns * size * size))
        left, right = column * size, min((column + columns) * size, self.length)
        parts = []
        for first in range(row, row + rows, step):
            check_time()
            end = min(first + step, row + rows)
            values = self.block(first * size, min(end * size, self.length), left, right)
            parts.append(reduce_block(values, end - first, columns, size))
        return Sums(*(torch.cat(each) for each in zip(*parts, strict=True)))

    def extremes_without_first_key(self) -> tuple[float, float]:
        """The smallest and the largest value of the keys from 1 on; of all keys if there is no other."""
        left = min(1, self.length - 1)
        rows = max(1, ENTRIES // self.length)
        low, high = math.inf, -math.inf
        for first in range(0, self.length, rows):
            check_time()
            values = self.block(first, min(first + rows, self.length), left, self.length)
            seen = values.isfinite()
            low = min(low, float(torch.where(seen, values, torch.inf).amin()))
            high = max(high, float(torch.where(seen, values, -torch.inf).amax()))
        return low, high

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps besides the layer's own tensors."""
        return 0


def reduce_block(values: Tensor, rows: int, columns: int, size: int) -> Sums:
    """Reduce entries (queries, keys) to rows × columns cells; what is missing at the end counts as not seen."""
    queries, keys = values.shape
    if (queries, keys) == (rows * size, columns * size):
        by_row = values.view(rows, size, keys)  # rows are reduced before columns, along memory, which is faster
        low, high = (x.view(rows, columns, size) for x in (by_row.amin(dim=1), by_row.amax(dim=1)))
        low, high = low.amin(dim=-1), high.amax(dim=-1)
        if bool((low.isfinite() & high.isfinite()).all()):  # otherwise some entries are not seen
            total = by_row.sum(dim=1).view(rows, columns, size).double().sum(dim=-1)
            return Sums(low, total, high, torch.full((rows, columns), float(size * size), dtype=torch.float64))
    values = F.pad(values, (0, columns * size - keys, 0, rows * size - queries), value=torch.nan)
    seen = values.isfinite().view(rows, size, -1)
    by_row = values.view(rows, size, -1)
    low = torch.where(seen, by_row, torch.inf).amin(dim=1)
    high = torch.where(seen, by_row, -torch.inf).amax(dim=1)
    total, count = torch.where(seen, by_row, 0.0).sum(dim=1).double(), seen.sum(dim=1).double()
    low, high, total, count = (x.view(rows, columns, size) for x in (low, high, total, count))
    return Sums(low.amin(dim=-1), total.sum(dim=-1), high.amax(dim=-1), count.sum(dim=-1))
