"""Values that are a function of the distance alone: tiles of any level from one table."""

import torch
from torch import Tensor

from relpos.maps.sources import Source, Sums


class ByDistance(Source):
    """A map whose entries are a function of the distance query − key.

    Args:
        values: By distance, (distances,): 0…length − 1 of a causal map, −(length − 1)…length − 1 in both directions.
            What is not finite is not seen.
        length: Number of tokens.
    """

    cheap = True

    def __init__(self, values: Tensor, length: int) -> None:
        self.length = length
        self.values = torch.where(values.isfinite(), values, torch.nan).double()
        self.zero = len(values) - length  # column of distance 0

    def block(self, first: int, end: int, left: int, right: int) -> Tensor:
        return self.at(torch.arange(first, end)[:, None] - torch.arange(left, right)).float()

    def at(self, distance: Tensor) -> Tensor:
        """The values at some distances, NaN at those that do not occur: the shape of `distance`."""
        place = distance + self.zero
        inside = (place >= 0) & (place < len(self.values))
        return torch.where(inside, self.values[place.clamp(0, len(self.values) - 1)], torch.nan)

    def cells(self, row: int, rows: int, column: int, columns: int, size: int) -> Sums:
        nearest = row - (column + columns - 1)  # cells that a column is apart from its row, at least
        number = rows + columns - 1
        apart = torch.arange(row, row + rows)[:, None] - torch.arange(column, column + columns) - nearest
        whole = Sums(*(x[apart] for x in self._by_cells_apart(nearest, number, size, size, size)))
        rest = self.length % size
        last = self.length // size  # the row and column of cells that are cut off, if rest > 0
        if not rest:
            return whole
        down, across = last - row, last - column
        for high, wide, here in (
            (rest, size, (slice(down, down + 1), slice(None))),
            (size, rest, (slice(None), slice(across, across + 1))),
            (rest, rest, (slice(down, down + 1), slice(across, across + 1))),
        ):
            if (high == rest and not 0 <= down < rows) or (wide == rest and not 0 <= across < columns):
                continue
            cut = self._by_cells_apart(nearest, number, size, high, wide)
            for kept, new in zip(whole, cut, strict=True):
                kept[here] = new[apart[here]]
        return whole

    def _by_cells_apart(self, nearest: int, number: int, size: int, rows: int, columns: int) -> Sums:
        """Cells of rows × columns entries that are nearest, nearest + 1, … cells of `size` from the diagonal.

        The entries of such a cell have the distances from d·size − (columns − 1) to d·size + rows − 1, those in the
        middle most often. Each result is (cells apart,).
        """
        offset = torch.arange(1 - columns, rows)
        often = torch.stack([offset + columns, rows - offset]).amin(dim=0).clamp(max=min(rows, columns))
        cell = torch.arange(nearest, nearest + number)
        around = self.at(cell[:, None] * size + offset)  # (cells apart, distances)
        seen = around.isfinite()
        low = torch.where(seen, around, torch.inf).amin(dim=-1)
        high = torch.where(seen, around, -torch.inf).amax(dim=-1)
        total = (torch.where(seen, around, 0.0) * often).sum(dim=-1)
        return Sums(low, total, high, (seen * often).sum(dim=-1).double())

    def extremes_without_first_key(self) -> tuple[float, float]:
        # Only the largest distance occurs with no other key than the first.
        seen = self.values[:-1] if self.length > 1 else self.values
        seen = seen[seen.isfinite()]
        return float(seen.amin()), float(seen.amax())

    @property
    def nbytes(self) -> int:
        return self.values.nbytes
