"""A long map of the form Scaled, by the pieces of its function and not entry by entry.

B_ij = f_h(x),  x = table[i − j] / row[i],  f_h linear between knots. The table and the rows never fall, so the entries
between two knots stand together, along a row and along a diagonal: their sums come from running sums of the table and
of 1 / row, and the smallest and largest are among the first and the last of each run.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.attend.hinges import hinges
from relpos.encodings.forms import Scaled
from relpos.view.cells import Cells
from relpos.view.numbers import Diagonals, counts

NUMBERS = 2**18  # written out at a time


class Pieces:
    """The function of a form, and the running sums of its table and of its rows, in float64."""

    def __init__(self, form: Scaled) -> None:
        self.table, self.row = form.table.double(), form.row[0].double()
        self.inverse = 1 / self.row
        self.knot, self.base, self.gain, self.bend = hinges(form, self.inverse)
        self.before = F.pad(self.table.cumsum(0), (1, 0))  # the sum of all nearer distances
        self.length = len(self.row)

    def values(self, x: Tensor) -> Tensor:
        """f_h at x (…), in the dtype of x: (heads, …)."""
        knot, base, gain, bend = (numbers.to(x.dtype) for numbers in (self.knot, self.base, self.gain, self.bend))
        flat = x.flatten()
        bent = torch.addmm(base[:, None], bend, (flat - knot[:, None]).relu_())
        return bent.addcmul_(gain[:, None], flat).view(-1, *x.shape)

    def fill_cells(self, cells: Cells, progress: Callable[[float], None]) -> None:
        """Minimum, mean and maximum of every cell."""
        side, size = cells.low.shape[-1], cells.size
        rows = max(1, NUMBERS // (2 * side * len(self.knot)))
        for row in range(side):
            columns = row + 1
            progress((columns / side) ** 2)
            for first in range(row * size, min((row + 1) * size, self.length), rows):
                i = torch.arange(first, min(first + rows, (row + 1) * size, self.length))
                # Cell q has the distances from edge[q + 1] up to, but not with, edge[q].
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
        """The smallest and the largest of every cell over the rows i: (heads, columns). In float32, as in the map."""
        inverse = self.inverse[i, None].float()
        ends = torch.stack([edge[:, 1:], edge[:, :-1] - 1], dim=1)  # first and last distance: (rows, 2, columns)
        found = self.values(self.table[ends].float() * inverse[..., None])  # (heads, rows, 2, columns)
        low, high = found.amin(dim=1).amin(dim=1), found.amax(dim=1).amax(dim=1)  # (heads, columns)
        near = torch.cat([after - 1, after], dim=-1).clamp(min=0).minimum(i[:, None])  # beside knots: (rows, 2 · knots)
        found = self.values(self.table[near].float() * inverse).flatten(1)  # (heads, entries)
        cell = ((i[:, None] - near) // size).flatten().expand_as(found)
        return low.scatter_reduce_(1, cell, found, "amin"), high.scatter_reduce_(1, cell, found, "amax")

    def fill_diagonals(self, found: Diagonals) -> None:
        """Count, sums, minimum and maximum of every diagonal."""
        heads = len(self.base)
        constant = self.base[:, None] - F.pad((self.bend * self.knot).cumsum(1), (1, 0))  # (heads, pieces)
        slope = self.gain[:, None] + F.pad(self.bend.cumsum(1), (1, 0))
        once, twice = (F.pad(x.cumsum(0), (1, 0)) for x in (self.inverse, self.inverse**2))
        step = max(1, NUMBERS // (heads * (len(self.knot) + 1)))
        found.count = counts(self.length).expand(heads, -1).clone()
        for first in range(0, self.length, step):
            r = torch.arange(first, min(first + step, self.length))
            table = self.table[r]  # (distances,)
            found.first[:, r] = self.values(table * self.inverse[r])
            # Piece p has the rows from edge[p + 1] up to, but not with, edge[p]: x falls from row to row.
            edge = torch.searchsorted(self.row, table[:, None] / self.knot, right=False)  # (distances, knots)
            edge = F.pad(F.pad(edge, (1, 0), value=self.length), (0, 1)).maximum(r[:, None]).cummin(dim=1).values
            low, high = edge[:, 1:], edge[:, :-1]
            number = (high - low).double()
            gone = constant[:, None] - found.first[:, r, None]  # (heads, distances, pieces)
            rise = slope[:, None] * table[:, None]
            found.total[:, r] = (gone * number + rise * (once[high] - once[low])).sum(dim=-1)
            squares = (
                gone**2 * number + 2 * gone * rise * (once[high] - once[low]) + rise**2 * (twice[high] - twice[low])
            )
            found.squares[:, r] = squares.sum(dim=-1)
            ends = torch.stack([low, high - 1]).clamp(max=self.length - 1)  # first and last row of each piece
            value = constant[:, None] + rise * self.inverse[ends][:, None]  # (2, heads, distances, pieces)
            empty = number == 0
            found.low[:, r] = value.masked_fill(empty, torch.inf).amin(dim=(0, -1))
            found.high[:, r] = value.masked_fill(empty, -torch.inf).amax(dim=(0, -1))


def has_pieces(form: object) -> bool:
    """Whether a form can be looked at by its pieces: neither its table nor its rows ever fall."""
    return isinstance(form, Scaled) and bool((form.table.diff() >= 0).all()) and bool((form.row.diff() >= 0).all())
