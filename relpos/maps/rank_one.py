"""A bias of the form RankOne: over the keys of a cell it is linear in their running sums, along a diagonal products."""

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.forms.bias import RankOne
from relpos.maps.diagonals import Diagonals, counts
from relpos.maps.values import Cells, HeadValues, check_time

COARSE = 8  # queries per cell from which rows of cells are reduced this way


class RankOneValues(HeadValues):
    """B_ij = −w_i·(T_i − T_j) for keys up to the query, of a causal bias with a single head."""

    closed = causal = True

    def __init__(self, form: RankOne, length: int) -> None:
        self.length = length
        self.total = form.total[0, 0].double()  # (length,)
        self.weight = torch.ones_like(self.total) if form.weight is None else form.weight[0, 0].double()

    def block(self, first: int, end: int, left: int, right: int) -> Tensor:
        i, j = torch.arange(first, end)[:, None], torch.arange(left, right)
        values = -self.weight[first:end, None] * (self.total[first:end, None] - self.total[left:right]) + 0.0
        return values.masked_fill(i < j, torch.nan).float()

    def cells(self, row: int, rows: int, column: int, columns: int, size: int) -> Cells:
        if size < COARSE:
            return super().cells(row, rows, column, columns, size)
        keys = slice(column * size, (column + columns) * size)
        padded = F.pad(self.total[keys], (0, max(0, keys.stop - self.length))).view(columns, size)
        inside = (torch.arange(keys.start, keys.stop) < self.length).view(columns, size)
        low_key = torch.where(inside, padded, torch.inf).amin(dim=1)
        high_key = torch.where(inside, padded, -torch.inf).amax(dim=1)
        sum_key, number = torch.where(inside, padded, 0.0).sum(dim=1), inside.sum(dim=1).double()
        low, total, high, seen = cells = Cells.empty(rows, columns)
        for place in range(rows):
            check_time(place / rows)
            queries = slice((row + place) * size, min((row + place + 1) * size, self.length))
            weight, sums = self.weight[queries], self.total[queries]
            before = min(max(row + place - column, 0), columns)  # columns of which all keys are seen
            if before:
                ends = torch.stack([low_key[:before], high_key[:before]])[:, None]  # (2, 1, columns)
                values = -weight[:, None] * (sums[:, None] - ends)  # (2, queries, columns)
                low[place, :before] = values.amin(dim=(0, 1))
                high[place, :before] = values.amax(dim=(0, 1))
                total[place, :before] = weight.sum() * sum_key[:before] - (weight * sums).sum() * number[:before]
                seen[place, :before] = len(sums) * number[:before]
            if column <= row + place < column + columns:  # the cell on the diagonal: keys up to each query
                here = row + place - column
                values = self._extremes(weight, sums)
                low[place, here], high[place, here] = values.amin(), values.amax()
                count = torch.arange(1, len(sums) + 1, dtype=torch.float64)
                total[place, here] = (weight * (sums.cumsum(dim=0) - sums * count)).sum()
                seen[place, here] = count.sum()
        return cells

    @staticmethod
    def _extremes(weight: Tensor, total: Tensor) -> Tensor:
        """The smallest and the largest value of each query over the keys up to its own: (2, queries)."""
        return -weight * (total - torch.stack([total.cummin(dim=0).values, total.cummax(dim=0).values]))

    def diagonals(self) -> Diagonals:
        """Sums by correlations of w and T, which are products of their Fourier transforms.

        With T_i = a·i + R_i, an entry differs from −m·a·d, m the mean of w, by −(w_i − m)·a·d − w_i·(R_i − R_{i−d}): no
        large numbers cancel.
        """
        n, w = self.length, self.weight
        slope = (self.total[-1] - self.total[0]) / max(n - 1, 1)
        d = torch.arange(n, dtype=torch.float64)
        rest = self.total - slope * d
        rest = rest - rest.mean()
        mean = w.mean()
        deviation = w - mean
        diagonals = Diagonals(1, n, extremes=False)
        diagonals.count = counts(n)[None]
        diagonals.first = (-mean * slope * d)[None]

        def beyond(x: Tensor) -> Tensor:  # Σ of x_i over i ≥ d
            return x.flip(0).cumsum(dim=0).flip(0)

        transformed = torch.fft.rfft(torch.stack([w, deviation * w, w**2 * rest, w**2, rest, rest**2]), 2 * n)
        pairs = transformed[:4] * transformed[[4, 4, 4, 5]].conj()
        by_weight, by_deviation, by_product, by_square = torch.fft.irfft(pairs, 2 * n)[:, :n]  # Σ x_i y_{i−d}
        total = -slope * d * beyond(deviation) - beyond(w * rest) + by_weight
        squares = beyond((w * rest) ** 2) - 2 * by_product + by_square
        squares += (slope * d) ** 2 * beyond(deviation**2)
        squares += 2 * slope * d * (beyond(deviation * w * rest) - by_deviation)
        diagonals.total, diagonals.squares = total[None], squares.clamp(min=0)[None]
        extremes = self._extremes(w, self.total)
        diagonals.low, diagonals.high = (x.expand(1, n) for x in extremes.aminmax())
        return diagonals

    def diagonal(self, distance: int) -> Tensor:
        n = self.length
        if distance < 0:
            return torch.full((n + distance,), torch.nan)
        return -self.weight[distance:] * (self.total[distance:] - self.total[: n - distance]) + 0.0

    def squared_difference(self, other: HeadValues) -> float | None:
        """Σ over i and j ≤ i of (c_i + w_i·T_j − v_i·S_j)², with running sums of T, S and their products."""
        if not isinstance(other, RankOneValues):
            return None
        w, v = self.weight, other.weight
        t, s = (x.total - x.total.mean() for x in (self, other))
        c = v * s - w * t
        count = torch.arange(1, self.length + 1, dtype=torch.float64)
        sum_t, sum_s, tt, ss, ts = (x.cumsum(dim=0) for x in (t, s, t * t, s * s, t * s))
        rows = c * c * count + w * w * tt + v * v * ss + 2 * (c * w * sum_t - c * v * sum_s - w * v * ts)
        return float(rows.clamp(min=0).sum())

    def extremes_without_first_key(self) -> tuple[float, float]:
        if self.length == 1:
            return super().extremes_without_first_key()
        values = self._extremes(self.weight[1:], self.total[1:])
        return float(values.amin()), float(values.amax())

    @property
    def nbytes(self) -> int:
        return self.total.nbytes + self.weight.nbytes
