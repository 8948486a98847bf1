"""A bias of the form Scaled (FIRE), reduced by rows with the linear pieces of its function.

f is linear between knots, and along a row x = table[d] / row_i never decreases with the distance d. So the sum of f
over the distances below e follows from cumulative sums of the table and from how many knots lie below; and the extremes
of a cell are among its ends and the entries beside the knots.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.encodings.forms import Scaled
from relpos.view.explorer.deadline import check_time
from relpos.view.explorer.entries import Entries
from relpos.view.explorer.sources import Source, Sums
from relpos.view.layers import Layer
from relpos.view.scaled_maps import ScaledMap

COARSE = 4  # queries per cell from which rows of cells are reduced this way
NUMBERS = 2**19  # values that are materialised at a time


class ScaledRows(Source):
    """A causal bias of the form Scaled whose table and rows never decrease.

    Args:
        layer: The layer.
        head: The head; 0 is the first.
    """

    cheap = True

    def __init__(self, layer: Layer, head: int) -> None:
        assert isinstance(layer.form, Scaled)
        self.length, self.entries = layer.length, Entries(layer, head, "bias")
        whole = ScaledMap(layer.form)
        self.table, self.row, self.inverse, self.before = whole.table, whole.row, whole.inverse, whole.before
        base, gain, bend = whole.base[head], whole.gain[head], whole.bend[head]
        self.knot, self.bend = whole.knot, bend
        # On piece p, beyond p knots, f(x) = constant[p] + slope[p]·x.
        self.constant = base - F.pad((bend * whole.knot).cumsum(0), (1, 0))
        self.slope = gain + F.pad(bend.cumsum(0), (1, 0))

    def block(self, first: int, end: int, left: int, right: int) -> Tensor:
        i, j = torch.arange(first, end)[:, None], torch.arange(left, right)
        x = self.table[(i - j).clamp(min=0)] * self.inverse[first:end, None]
        values = self._values(x, torch.searchsorted(self.knot, x))
        return values.masked_fill(i < j, torch.nan).float()

    def _values(self, x: Tensor, piece: Tensor) -> Tensor:
        return self.constant[piece] + self.slope[piece] * x

    def cells(self, row: int, rows: int, column: int, columns: int, size: int) -> Sums:
        if size < COARSE:
            return super().cells(row, rows, column, columns, size)
        low = torch.full((rows, columns), torch.inf, dtype=torch.float64)
        high = torch.full((rows, columns), -torch.inf, dtype=torch.float64)
        total, seen = torch.zeros(2, rows, columns, dtype=torch.float64)
        step = max(1, NUMBERS // (columns + 2 * len(self.knot) + 1))
        for place in range(rows):
            wide = min(row + place + 1 - column, columns)  # columns that the last query of the row of cells sees
            if wide <= 0:
                continue
            end = min((row + place + 1) * size, self.length)
            for first in range((row + place) * size, end, step):
                check_time()
                i = torch.arange(first, min(first + step, end))
                # A column holds the distances from edge[c + 1] (included) to edge[c] (excluded).
                edge = (i[:, None] + 1 - size * torch.arange(column, column + wide + 1)).clamp(min=0)
                sums, least, most = self._reduced(i, edge, column, size)
                total[place, :wide] += sums
                seen[place, :wide] += (edge[:, :-1] - edge[:, 1:]).sum(dim=0)
                low[place, :wide] = torch.minimum(low[place, :wide], least)
                high[place, :wide] = torch.maximum(high[place, :wide], most)
        return Sums(low, total, high, seen)

    def _reduced(self, i: Tensor, edge: Tensor, column: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sum, minimum and maximum of each column over the rows i: (columns,) each."""
        inverse = self.inverse[i, None]  # (rows, 1)
        after = torch.searchsorted(self.table, self.knot * self.row[i, None], right=True)  # first distance beyond
        piece = torch.searchsorted(after, edge, right=True)  # knots below each edge: (rows, columns + 1)
        jumps = self.bend * (inverse * self.before[after] - self.knot * after)
        jumps = F.pad(jumps.cumsum(dim=1), (1, 0))
        scaled = inverse * self.before[edge]
        below = self.constant[piece] * edge + self.slope[piece] * scaled - jumps.gather(1, piece)
        sums = -below.sum(dim=0).diff()
        # The ends of each column, and the entries beside the knots.
        near, far = edge[:, 1:], edge[:, :-1] - 1
        empty = (far < near).repeat(1, 2)
        ends = torch.cat([near, far.clamp(min=0)], dim=1)  # (rows, 2 · columns)
        values = self._values(self.table[ends] * inverse, torch.searchsorted(after, ends, right=True))
        least = values.masked_fill(empty, torch.inf).amin(dim=0).view(2, -1).amin(dim=0)
        most = values.masked_fill(empty, -torch.inf).amax(dim=0).view(2, -1).amax(dim=0)
        beside = torch.cat([after - 1, after], dim=1).clamp(min=0).minimum(i[:, None])  # (rows, 2 · knots)
        cell = (i[:, None] - beside) // size - column
        inside = (cell >= 0) & (cell < len(least))
        if bool(inside.any()):
            x = self.table[beside] * inverse
            values = self._values(x, torch.searchsorted(after, beside, right=True))[inside]
            least = least.scatter_reduce(0, cell[inside], values, "amin")
            most = most.scatter_reduce(0, cell[inside], values, "amax")
        return sums, least, most

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.table, self.row, self.inverse, self.before))
