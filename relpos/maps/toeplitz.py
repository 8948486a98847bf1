"""Values by the distance alone, and the softmax of such a bias over equal content: cells of any size from one table."""

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.maps.diagonals import Diagonals, counts
from relpos.maps.values import Cells, HeadValues

COARSE = 4  # queries per cell from which rows of cells are reduced by windows instead of entry by entry


class ByDistance(HeadValues):
    """A map whose entries are a function of the distance query − key.

    `values` (distances,) has 0…length − 1 of a causal map, −(length − 1)…length − 1 in both directions; what is not
    finite is not seen.
    """

    closed = True

    def __init__(self, values: Tensor, length: int) -> None:
        self.length = length
        self.values = torch.where(values.isfinite(), values, torch.nan).double()
        self.zero = len(values) - length  # column of distance 0
        self.causal = self.zero == 0

    def block(self, first: int, end: int, left: int, right: int) -> Tensor:
        return self.at(torch.arange(first, end)[:, None] - torch.arange(left, right)).float()

    def at(self, distance: Tensor) -> Tensor:
        """The values at some distances, NaN at those that do not occur: the shape of `distance`."""
        place = distance + self.zero
        inside = (place >= 0) & (place < len(self.values))
        return torch.where(inside, self.values[place.clamp(0, len(self.values) - 1)], torch.nan)

    def cells(self, row: int, rows: int, column: int, columns: int, size: int) -> Cells:
        nearest = row - (column + columns - 1)  # cells that a column is apart from its row, at least
        number = rows + columns - 1
        apart = torch.arange(row, row + rows)[:, None] - torch.arange(column, column + columns) - nearest
        cells = Cells(*(x[apart] for x in self._by_cells_apart(nearest, number, size, size, size)))
        rest = self.length % size
        last = self.length // size  # the row and column of cells that are cut off, if rest > 0
        if not rest:
            return cells
        down, across = last - row, last - column
        for high, wide, here in (
            (rest, size, (slice(down, down + 1), slice(None))),
            (size, rest, (slice(None), slice(across, across + 1))),
            (rest, rest, (slice(down, down + 1), slice(across, across + 1))),
        ):
            if (high == rest and not 0 <= down < rows) or (wide == rest and not 0 <= across < columns):
                continue
            cut = self._by_cells_apart(nearest, number, size, high, wide)
            for all_cells, new in zip(cells, cut, strict=True):
                all_cells[here] = new[apart[here]]
        return cells

    def _by_cells_apart(self, nearest: int, number: int, size: int, rows: int, columns: int) -> Cells:
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
        return Cells(low, total, high, (seen * often).sum(dim=-1).double())

    def diagonals(self) -> Diagonals:
        diagonals = Diagonals(1, self.length, self.causal)
        values, seen = self.values[None], self.values.isfinite()[None]
        diagonals.count = seen * counts(self.length, self.causal)
        diagonals.first = torch.where(seen, values, 0.0)
        diagonals.low, diagonals.high = torch.where(seen, values, torch.inf), torch.where(seen, values, -torch.inf)
        return diagonals

    def diagonal(self, distance: int) -> Tensor:
        return self.at(torch.tensor(distance)).expand(self.length - abs(distance))

    def squared_difference(self, other: HeadValues) -> float | None:
        if not isinstance(other, ByDistance) or other.zero != self.zero:
            return None
        return float(((self.values - other.values) ** 2 * counts(self.length, self.causal)).nansum())

    def extremes_without_first_key(self) -> tuple[float, float]:
        # Only the largest distance occurs with no other key than the first.
        seen = self.values[:-1] if self.length > 1 else self.values
        seen = seen[seen.isfinite()]
        return float(seen.amin()), float(seen.amax())

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


class FlatContent(HeadValues):
    """Weights e^b(i − j) / Σ_j e^b(i − j): the softmax over equal content, for a bias b by distance."""

    def __init__(self, bias: ByDistance) -> None:
        self.length, self.causal, self.bias = bias.length, bias.causal, bias
        logits = bias.values.nan_to_num(nan=-torch.inf)
        before = logits[bias.zero :].logcumsumexp(dim=0)  # over the distances 0…i
        self.closed = bias.causal
        if bias.zero:  # and over the keys after the query, of which the first query sees most
            after = logits[: bias.zero].flip(0).logcumsumexp(dim=0).flip(0)  # (length − 1,)
            before = torch.logaddexp(before, F.pad(after, (0, 1), value=-torch.inf))
        self.lse = before  # (length,)

    def block(self, first: int, end: int, left: int, right: int) -> Tensor:
        values = self.bias.at(torch.arange(first, end)[:, None] - torch.arange(left, right))
        return (values - self.lse[first:end, None]).exp().float()

    def cells(self, row: int, rows: int, column: int, columns: int, size: int) -> Cells:
        if size < COARSE or not self.closed or size & (size - 1):
            return super().cells(row, rows, column, columns, size)
        nearest = row - (column + columns - 1)
        number = rows + columns - 1
        # Of the u-th query of a row of cells, the keys of a column that is a cells away have the distances from
        # a·size + u − (size − 1) to a·size + u.
        start = torch.arange(nearest, nearest + number)[:, None] * size + torch.arange(size) - (size - 1)
        low, high = self._windows(start, size)  # (cells apart, size)
        shares = (self.bias.values - self.bias.values.nan_to_num(-torch.inf).amax()).exp().nan_to_num()
        before = F.pad(shares.cumsum(dim=0), (1, 0))
        ends = [(start + offset).clamp(0, len(shares)) for offset in (0, size)]
        total = before[ends[1]] - before[ends[0]]
        seen = F.pad((shares > 0).double().cumsum(dim=0), (1, 0))
        count = seen[ends[1]] - seen[ends[0]]
        lse = F.pad(self.lse, (0, -self.length % size), value=torch.inf)
        scale = (self.bias.values.nan_to_num(-torch.inf).amax() - lse).exp()
        out = [torch.empty(rows, columns, dtype=torch.float64) for _ in range(4)]
        for place in range(rows):
            queries = slice((row + place) * size, (row + place + 1) * size)
            apart = slice(place, place + columns)  # the columns from the last to the first
            normaliser = lse[queries]
            real = normaliser.isfinite()
            least = torch.where(real, low[apart] - normaliser, torch.inf).amin(dim=1).exp()
            most = (high[apart] - normaliser).amax(dim=1).exp()
            number_seen = (count[apart] * real).sum(dim=1)
            sums = (total[apart] @ scale[queries]).clamp(min=0)
            sums = torch.minimum(torch.maximum(sums, least.nan_to_num(posinf=0.0) * number_seen), most * number_seen)
            for kept, new in zip(out, (least, sums, most, number_seen), strict=True):
                kept[place] = new.flip(0)
        out[2] = torch.where(out[3] > 0, out[2], -torch.inf)
        return Cells(*out)

    def _windows(self, start: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The smallest and the largest bias of the `size` (a power of two) distances from each start on."""
        low, high = self.bias.values.nan_to_num(nan=torch.inf), self.bias.values.nan_to_num(nan=-torch.inf)
        low, high = F.pad(low, (size, size), value=torch.inf), F.pad(high, (size, size), value=-torch.inf)
        width = 1
        while width < size:
            low = torch.minimum(low[:-width], low[width:])
            high = torch.maximum(high[:-width], high[width:])
            width *= 2
        place = start.clamp(-size, self.length) + size
        return low[place], high[place]

    def diagonal(self, distance: int) -> Tensor:
        first = max(distance, 0)
        lse = self.lse[first : first + self.length - abs(distance)]
        return (self.bias.at(torch.tensor(distance)) - lse).exp()

    def extremes_without_first_key(self) -> tuple[float, float]:
        if not self.closed:
            return super().extremes_without_first_key()
        values = self.bias.values.nan_to_num(nan=torch.inf)
        nearest = values[:-1].cummin(dim=0).values  # of the keys 1…i, for the queries from 1 on
        largest = self.bias.values.nan_to_num(nan=-torch.inf)[:-1].cummax(dim=0).values
        if self.length == 1:
            return 1.0, 1.0
        return float((nearest - self.lse[1:]).amin().exp()), float((largest - self.lse[1:]).amax().exp())

    def mean_entropy(self) -> float:
        if not self.closed:
            return super().mean_entropy()
        logits = self.bias.values.nan_to_num(nan=-torch.inf)
        shares = (logits - logits.amax()).exp()
        weighted = torch.where(shares > 0, shares * logits.nan_to_num(neginf=0.0), 0.0).cumsum(dim=0)  # Σ e^b·b
        mean = weighted * (logits.amax() - self.lse).exp()
        return float((self.lse - mean).clamp(min=0).mean())

    @property
    def nbytes(self) -> int:
        return self.lse.nbytes
