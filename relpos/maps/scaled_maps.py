"""Long maps of the form Scaled (FIRE), reduced by the linear pieces of its function instead of entry by entry.

B_ij = f_h(x),  x = table[i − j] / row[i],  f_h linear between knots. Neither the table nor the rows ever decrease, so
the entries between two knots are contiguous along a row and along a diagonal. Their sums follow from cumulative sums of
the table and of 1 / row, and their extremes are among the first and the last entry of each piece.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.attend.piecewise import hinges
from relpos.forms.bias import Scaled
from relpos.maps.cells import Cells
from relpos.maps.diagonals import Diagonals, counts

NUMBERS = 2**18  # values that are materialised at a time


class ScaledMap:
    """The function of a form, and the cumulative sums of its table and of its rows, in float64. Causal."""

    def __init__(self, form: Scaled) -> None:
        self.table, self.row = form.table.double(), form.row[0].double()
        self.inverse = 1 / self.row
        self.knot, self.base, self.gain, self.bend = hinges(form, self.inverse)
        self.before = F.pad(self.table.cumsum(0), (1, 0))  # the sum over all shorter distances
        self.length = len(self.row)

    def values(self, x: Tensor) -> Tensor:
        """Evaluate f_h at x (…), in the dtype of x: (heads, …)."""
        knot, base, gain, bend = (numbers.to(x.dtype) for numbers in (self.knot, self.base, self.gain, self.bend))
        flat = x.flatten()
        bent = torch.addmm(base[:, None], bend, (flat - knot[:, None]).relu_())
        return bent.addcmul_(gain[:, None], flat).view(-1, *x.shape)

    def fill_cells(self, cells: Cells, progress: Callable[[float], None]) -> None:
        """Compute minimum, mean and maximum of every cell."""
        side, size = cells.low.shape[-1], cells.size
        rows = max(1, NUMBERS // (2 * side * len(self.knot)))
        for row in range(side):
            columns = row + 1
            progress((columns / side) ** 2)
            for first in range(row * size, min((row + 1) * size, self.length), rows):
                i = torch.arange(first, min(first + rows, (row + 1) * size, self.length))
                # Cell q holds the distances from edge[q + 1] (included) to edge[q] (excluded).
                edge = (i[:, None] + 1 - size * torch.arange(columns + 1)).clamp(min=0)  # (rows, columns + 1)
                after = torch.searchsorted(self.table, self.knot * self.row[i, None], right=True)  # beyond each knot
                here = (slice(None), row, slice(columns))
                cells.total[here] += self._sums(i, edge, after)
                cells.count[here] += (edge[:, :-1] - edge[:, 1:]).sum(dim=0)
                low, high = self._extremes(i, edge, after, size)
                cells.low[here] = cells.low[here].minimum(low)
                cells.high[here] = cells.high[here].maximum(high)

    def _sums(self, i: Tensor, edge: Tensor, after: Tensor) -> Tensor:
        """The sum of every cell over the rows i: (heads, columns)."""
        inverse = self.inverse[i, None]
        x = -(inverse * self.before[edge]).sum(dim=0).diff()  # (columns,)
        number = -edge.sum(dim=0).diff()
        beyond = torch.maximum(edge[:, :, None], after[:, None])  # (rows, columns + 1, knots)
        bent = (inverse[..., None] * self.before[beyond] - self.knot * beyond).sum(dim=0)  # of x − knot, beyond it
        bent = -bent.diff(dim=0)  # (columns, knots)
        return self.base[:, None] * number + self.gain[:, None] * x + self.bend @ bent.T

    def _extremes(self, i: Tensor, edge: Tensor, after: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Minimum and maximum of every cell over the rows i: (heads, columns). In float32, as in the map."""
        inverse = self.inverse[i, None].float()
        ends = torch.stack([edge[:, 1:], edge[:, :-1] - 1], dim=1)  # first and last distance: (rows, 2, columns)
        values = self.values(self.table[ends].float() * inverse[..., None])  # (heads, rows, 2, columns)
        low, high = values.amin(dim=1).amin(dim=1), values.amax(dim=1).amax(dim=1)  # (heads, columns)
        near = torch.cat([after - 1, after], dim=-1).clamp(min=0).minimum(i[:, None])  # beside knots: (rows, 2 · knots)
        values = self.values(self.table[near].float() * inverse).flatten(1)  # (heads, entries)
        cell = ((i[:, None] - near) // size).flatten().expand_as(values)
        return low.scatter_reduce_(1, cell, values, "amin"), high.scatter_reduce_(1, cell, values, "amax")

    def fill_diagonals(self, diagonals: Diagonals) -> None:
        """Compute count, sums, minimum and maximum of every diagonal."""
        heads = len(self.base)
        constant = self.base[:, None] - F.pad((self.bend * self.knot).cumsum(1), (1, 0))  # (heads, pieces)
        slope = self.gain[:, None] + F.pad(self.bend.cumsum(1), (1, 0))
        once, twice = (F.pad(x.cumsum(0), (1, 0)) for x in (self.inverse, self.inverse**2))
        step = max(1, NUMBERS // (heads * (len(self.knot) + 1)))
        diagonals.count = counts(self.length).expand(heads, -1).clone()
        for first in range(0, self.length, step):
            r = torch.arange(first, min(first + step, self.length))
            table = self.table[r]  # (distances,)
            diagonals.first[:, r] = self.values(table * self.inverse[r])
            # Piece p holds the rows from edge[p + 1] (included) to edge[p] (excluded), since x decreases with the row.
            edge = torch.searchsorted(self.row, table[:, None] / self.knot, right=False)  # (distances, knots)
            edge = F.pad(F.pad(edge, (1, 0), value=self.length), (0, 1)).maximum(r[:, None]).cummin(dim=1).values
            low, high = edge[:, 1:], edge[:, :-1]
            number = (high - low).double()
            offset = constant[:, None] - diagonals.first[:, r, None]  # (heads, distances, pieces)
            rise = slope[:, None] * table[:, None]
            diagonals.total[:, r] = (offset * number + rise * (once[high] - once[low])).sum(dim=-1)
            squares = (
                offset**2 * number + 2 * offset * rise * (once[high] - once[low]) + rise**2 * (twice[high] - twice[low])
            )
            diagonals.squares[:, r] = squares.sum(dim=-1)
            ends = torch.stack([low, high - 1]).clamp(max=self.length - 1)  # first and last row of each piece
            value = constant[:, None] + rise * self.inverse[ends][:, None]  # (2, heads, distances, pieces)
            empty = number == 0
            diagonals.low[:, r] = value.masked_fill(empty, torch.inf).amin(dim=(0, -1))
            diagonals.high[:, r] = value.masked_fill(empty, -torch.inf).amax(dim=(0, -1))


def has_pieces(form: object) -> bool:
    """Whether a form can be reduced by its pieces: causal and Scaled, and neither its table nor its rows decrease."""
    if not isinstance(form, Scaled) or form.column is not None:
        return False
    return bool((form.table.diff() >= 0).all()) and bool((form.row.diff() >= 0).all())
