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
NUMBERS = 2**16  # values that are materialised at a time


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
        # On piece p, beyond p knots, f(x) = constant[p] + slope[p]·x. Knots that all x or no x lie beyond do not count.
        always = int((whole.knot < 0).sum())
        inside = slice(always, always + int(((whole.knot >= 0) & (whole.knot < float(self._largest(whole)))).sum()))
        pieces = slice(inside.start, inside.stop + 1)
        self.knot, self.bend = whole.knot[inside].contiguous(), bend[inside]
        self.constant = (base - F.pad((bend * whole.knot).cumsum(0), (1, 0)))[pieces]
        self.slope = (gain + F.pad(bend.cumsum(0), (1, 0)))[pieces]

    @staticmethod
    def _largest(whole: ScaledMap) -> Tensor:
        """The largest x: that of the farthest key of some query."""
        return (whole.table[: whole.length] * whole.inverse).amax()

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
        step = max(1, NUMBERS // (size * (columns + 2 * len(self.knot) + 1)))  # rows of cells at a time
        for first in range(0, rows, step):
            last = min(first + step, rows)
            wide = min(row + last - column, columns)  # columns that the last query of these rows of cells sees
            if wide <= 0:
                continue
            check_time()
            i = torch.arange((row + first) * size, (row + last) * size)
            here = (slice(first, last), slice(wide))
            low[here], total[here], high[here], seen[here] = self._reduced(i, column, wide, size)
        return Sums(low, total, high, seen)

    def _reduced(self, i: Tensor, column: int, columns: int, size: int) -> Sums:
        """The cells of complete rows of cells, whose queries are i; queries beyond the last see nothing."""
        rows = len(i) // size
        inside = i < self.length
        i = i.clamp(max=self.length - 1)
        inverse = self.inverse[i, None]  # (queries, 1)
        # A column holds the distances from edge[c + 1] (included) to edge[c] (excluded).
        edge = (i[:, None] + 1 - size * torch.arange(column, column + columns + 1)).clamp(min=0) * inside[:, None]
        after = torch.searchsorted(self.table, self.knot * self.row[i, None], right=True)  # first distance beyond
        piece = torch.searchsorted(after, edge, right=True)  # knots below each edge: (queries, columns + 1)
        jumps = F.pad((self.bend * (inverse * self.before[after] - self.knot * after)).cumsum(dim=1), (1, 0))
        below = self.constant[piece] * edge + self.slope[piece] * (inverse * self.before[edge]) - jumps.gather(1, piece)
        total = -below.view(rows, size, -1).sum(dim=1).diff(dim=1)
        seen = -edge.view(rows, size, -1).sum(dim=1).diff(dim=1).double()
        # The extremes are among the ends of each column and the entries beside the knots.
        earlier = torch.searchsorted(after, edge)  # knots below the distance before each edge
        x, x_before = (
            self.table[place] * inverse for place in (edge.clamp(max=self.length - 1), (edge - 1).clamp(min=0))
        )
        empty = edge[:, :-1] <= edge[:, 1:]
        near = self._values(x[:, 1:], piece[:, 1:])
        far = self._values(x_before[:, :-1], earlier[:, :-1])
        low = torch.minimum(near, far).masked_fill_(empty, torch.inf)
        high = torch.maximum(near, far).masked_fill_(empty, -torch.inf)
        low, high = low.view(rows, size, -1).amin(dim=1), high.view(rows, size, -1).amax(dim=1)
        beside = torch.cat([after - 1, after], dim=1).clamp(min=0).minimum(i[:, None])  # (queries, 2 · knots)
        cell = (i[:, None] - beside) // size - column
        good = (cell >= 0) & (cell < columns) & inside[:, None]
        values = self._values(self.table[beside] * inverse, torch.searchsorted(after, beside, right=True))[good]
        place = (torch.arange(len(i))[:, None] // size * columns + cell)[good]
        low = low.flatten().scatter_reduce(0, place, values, "amin").view(rows, columns)
        high = high.flatten().scatter_reduce(0, place, values, "amax").view(rows, columns)
        return Sums(low, total, high, seen)

    def extremes_without_first_key(self) -> tuple[float, float]:
        if self.length == 1:
            return super().extremes_without_first_key()
        i = torch.arange(1, self.length)
        inverse = self.inverse[i, None]
        after = torch.searchsorted(self.table, self.knot * self.row[i, None], right=True)
        farthest = i[:, None] - 1  # the distance of key 1
        places = torch.cat([torch.zeros_like(farthest), farthest, after - 1, after], dim=1)
        places = places.clamp(min=0).minimum(farthest)
        values = self._values(self.table[places] * inverse, torch.searchsorted(after, places, right=True))
        return float(values.amin()), float(values.amax())

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.table, self.row, self.inverse, self.before))
