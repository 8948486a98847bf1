"""A bias of the form RankOne, reduced by rows: over the keys of a cell it is linear in their running sums."""

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.forms.bias import RankOne
from relpos.maps.deadline import check_time
from relpos.maps.entries import Entries
from relpos.maps.layers import Layer
from relpos.maps.sources import Source, Sums

COARSE = 8  # queries per cell from which rows of cells are reduced this way


class RankOneRows(Source):
    """B_ij = −w_i·(T_i − T_j) for keys up to the query.

    Args:
        layer: A causal layer with such a bias.
        head: The head; 0 is the first.
    """

    cheap = True

    def __init__(self, layer: Layer, head: int) -> None:
        self.length, self.entries = layer.length, Entries(layer, head, "bias")
        form = layer.form
        assert isinstance(form, RankOne)
        self.total = form.total[0, head].double()  # (length,)
        self.weight = torch.ones_like(self.total) if form.weight is None else form.weight[0, head].double()

    def block(self, first: int, end: int, left: int, right: int) -> Tensor:
        return self.entries.block(first, end, left, right)

    def cells(self, row: int, rows: int, column: int, columns: int, size: int) -> Sums:
        if size < COARSE:
            return super().cells(row, rows, column, columns, size)
        keys = slice(column * size, (column + columns) * size)
        padded = F.pad(self.total[keys], (0, max(0, keys.stop - self.length))).view(columns, size)
        inside = (torch.arange(keys.start, keys.stop) < self.length).view(columns, size)
        low_key = torch.where(inside, padded, torch.inf).amin(dim=1)
        high_key = torch.where(inside, padded, -torch.inf).amax(dim=1)
        sum_key, number = torch.where(inside, padded, 0.0).sum(dim=1), inside.sum(dim=1).double()
        low, high = torch.full((rows, columns), torch.inf), torch.full((rows, columns), -torch.inf)
        total, seen = torch.zeros(2, rows, columns, dtype=torch.float64)
        for place in range(rows):
            check_time()
            queries = slice((row + place) * size, min((row + place + 1) * size, self.length))
            weight, own = self.weight[queries], self.total[queries]
            before = min(max(row + place - column, 0), columns)  # columns of which all keys are seen
            if before:
                ends = torch.stack([low_key[:before], high_key[:before]])[:, None]  # (2, 1, columns)
                values = -weight[:, None] * (own[:, None] - ends)  # (2, queries, columns)
                low[place, :before] = values.amin(dim=(0, 1)).float()
                high[place, :before] = values.amax(dim=(0, 1)).float()
                total[place, :before] = weight.sum() * sum_key[:before] - (weight * own).sum() * number[:before]
                seen[place, :before] = len(own) * number[:before]
            if column <= row + place < column + columns:  # the cell on the diagonal: keys up to each query
                here = row + place - column
                running = own.cummin(dim=0).values, own.cummax(dim=0).values
                values = -weight * (own - torch.stack(running))  # (2, queries)
                low[place, here], high[place, here] = values.amin().float(), values.amax().float()
                count = torch.arange(1, len(own) + 1, dtype=torch.float64)
                total[place, here] = (weight * (own.cumsum(dim=0) - own * count)).sum()
                seen[place, here] = count.sum()
        return Sums(low, total, high, seen)

    def extremes_without_first_key(self) -> tuple[float, float]:
        if self.length == 1:
            return super().extremes_without_first_key()
        own, weight = self.total[1:], self.weight[1:]
        values = -weight * (own - torch.stack([own.cummin(dim=0).values, own.cummax(dim=0).values]))
        return float(values.amin()), float(values.amax())

    @property
    def nbytes(self) -> int:
        return self.total.nbytes + self.weight.nbytes
