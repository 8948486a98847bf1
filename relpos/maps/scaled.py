"""A bias of the form Scaled (FIRE), reduced with the linear pieces of its function.

f is linear between knots, and x_ij = table[i − j] / row_i never decreases with i, nor with the distance along a row,
nor increases along a diagonal. So

- the extremes of a cell are among two of its corners and, where the slope of f changes its sign, the entries beside
  that knot;
- F_i(e), the sum of f over the distances below e, follows from cumulative sums of the table. Over the queries of a row
  of cells, Σ_i F_i is a product of matrices, plus what the knots add that only some of these queries are beyond;
- the entries of a diagonal that lie on one piece are contiguous: their sums follow from cumulative sums of 1 / row.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.attend.piecewise import hinges
from relpos.forms.bias import Scaled
from relpos.maps.diagonals import Diagonals, counts
from relpos.maps.values import Cells, HeadValues, check_time

COARSE = 4  # queries per cell from which cells are reduced this way
NUMBERS = 2**18  # values that are materialised at a time
ROUNDING = 1e-5  # relative: the table is in float32


class ScaledValues(HeadValues):
    """A causal bias with a single head for which `has_pieces` holds."""

    closed = causal = True

    def __init__(self, form: Scaled, length: int) -> None:
        self.length, self.form = length, form
        self.table, self.row = form.table.double(), form.row[0].double()
        self.inverse = 1 / self.row
        self.before = F.pad(self.table.cumsum(0), (1, 0))  # the sum over all shorter distances
        knot, base, gain, bend = hinges(form, self.inverse)
        # On piece p, beyond p knots, f(x) = constant[p] + slope[p]·x. Knots that all x or no x lie beyond do not count.
        largest = (self.table[: self.length] * self.inverse).amax()  # x of the farthest key of some query
        always = int((knot < 0).sum())
        inside = slice(always, always + int(((knot >= 0) & (knot < largest)).sum()))
        pieces = slice(inside.start, inside.stop + 1)
        self.knot, self.bend = knot[inside].contiguous(), bend[0, inside]
        self.constant = (base - F.pad((bend[0] * knot).cumsum(0), (1, 0)))[pieces]
        self.slope = (gain + F.pad(bend[0].cumsum(0), (1, 0)))[pieces]
        self.turning = (self.slope[:-1] * self.slope[1:] < 0).nonzero()[:, 0]  # knots at which f has an extreme

    def block(self, first: int, end: int, left: int, right: int) -> Tensor:
        i, j = torch.arange(first, end)[:, None], torch.arange(left, right)
        values = self._values(self.table[(i - j).clamp(min=0)] * self.inverse[first:end, None])
        return values.masked_fill(i < j, torch.nan).float()

    def _values(self, x: Tensor) -> Tensor:
        """f at x."""
        piece = torch.searchsorted(self.knot, x)
        return self.constant[piece] + self.slope[piece] * x

    def _after(self, i: Tensor, knot: Tensor) -> Tensor:
        """The first distance beyond each knot, of each query: (queries, knots)."""
        return torch.searchsorted(self.table, knot * self.row[i, None], right=True)

    def cells(self, row: int, rows: int, column: int, columns: int, size: int) -> Cells:
        if size < COARSE:
            return super().cells(row, rows, column, columns, size)
        low, total, high, seen = cells = Cells.empty(rows, columns)
        step = max(1, NUMBERS // (size * (len(self.knot) + 1)))  # rows of cells at a time
        for first in range(max(0, column - row), rows, step):  # rows before that see none of these columns
            check_time(first / rows)
            last = min(first + step, rows)
            wide = min(row + last - column, columns)  # columns that the last query of these rows of cells sees
            place = torch.arange(row + first, row + last)
            i = torch.arange((row + first) * size, (row + last) * size).clamp(max=self.length - 1)
            after = self._after(i, self.knot).view(last - first, size, -1)
            here = (slice(first, last), slice(wide))
            low[here], high[here] = self._extremes(place, column, wide, size, after)
            total[here], seen[here] = self._sums(place, column, wide, size, after)
        return cells

    def _extremes(self, row: Tensor, column: int, columns: int, size: int, after: Tensor) -> tuple[Tensor, Tensor]:
        """Minimum and maximum of the cells of some rows of cells: (rows, columns) each."""
        first, last = row * size, (row * size + size - 1).clamp(max=self.length - 1)
        left = torch.arange(column, column + columns) * size
        farthest = self._corner(last[:, None], (last[:, None] - left).clamp(min=0))
        nearest = self._corner(first[:, None], (first[:, None] - left - (size - 1)).clamp(min=0))
        diagonal = self._corner(last, torch.zeros_like(last))[:, None]  # of the cell on the diagonal: distance 0
        nearest = torch.where(first[:, None] == left, diagonal, nearest)
        hidden = first[:, None] < left
        low = torch.minimum(nearest, farthest).masked_fill_(hidden, torch.inf)
        high = torch.maximum(nearest, farthest).masked_fill_(hidden, -torch.inf)
        if not len(self.turning):
            return low, high
        i = torch.arange(int(first[0]), int(last[-1]) + 1)
        after = after[..., self.turning].flatten(0, 1)[: len(i)]
        beside = torch.cat([after - 1, after], dim=1).clamp(min=0).minimum(i[:, None])  # (queries, 2 · knots)
        cell = (i[:, None] - beside) // size - column
        good = (cell >= 0) & (cell < columns)
        values = self._values((self.table[beside] * self.inverse[i, None])[good])
        place = ((i[:, None] // size - int(row[0])) * columns + cell)[good]
        shape = low.shape
        low = low.flatten().scatter_reduce(0, place, values, "amin").view(shape)
        high = high.flatten().scatter_reduce(0, place, values, "amax").view(shape)
        return low, high

    def _corner(self, i: Tensor, distance: Tensor) -> Tensor:
        return self._values(self.table[distance] * self.inverse[i])

    def _sums(self, row: Tensor, column: int, columns: int, size: int, after: Tensor) -> tuple[Tensor, Tensor]:
        """Sum and number of the entries of the cells of some rows of cells: (rows, columns) each."""
        i = row[:, None] * size + torch.arange(size)  # (rows, size)
        real = i < self.length
        i = i.clamp(max=self.length - 1)
        inverse = self.inverse[i] * real
        # Column c of query i holds the distances from edge[c + 1] (included) to edge[c] (excluded), and edge[c] is
        # apart·size + u + 1 for the u-th query of a row that is `apart` cells from c: the same numbers in every row.
        edges = torch.arange(column, column + columns + 1)
        apart = row[:, None] - edges  # (rows, columns + 1); below 0 there is nothing to sum up
        below = apart.clamp(min=0)
        nearest, farthest = int(below.min()), int(below.max())
        number = (farthest - nearest + 1) * size
        sums = F.pad(self.before[nearest * size + 1 :][:number], (0, max(0, number - (self.length - nearest * size))))
        sums = sums.view(-1, size)  # of the table, below each edge: (cells apart, size)
        linear = (inverse @ sums.mT).gather(1, below - nearest)  # Σ_i Σ_{d < edge} x
        queries = real.sum(dim=1, keepdim=True)
        count = (below * size * queries + queries * (queries + 1) // 2).double()  # Σ_i edge
        beyond_x = (inverse[..., None] * self.before[after]).sum(dim=1)  # Σ_i Σ_{d < after} x: (rows, knots)
        beyond_n = (after * real[..., None]).sum(dim=1)
        jumps = F.pad((self.bend * (beyond_x - self.knot * beyond_n)).cumsum(dim=1), (1, 0))  # (rows, pieces)
        start = below * size + 1  # edge of the first query of a row
        piece = torch.searchsorted(after[:, 0].contiguous(), start, right=True)  # knots that all its queries are beyond
        under = self.constant[piece] * count + self.slope[piece] * linear - jumps.gather(1, piece)
        # Knots that only the later queries of a row are beyond.
        last = torch.searchsorted(after[:, -1].contiguous(), start + size - 1, right=True)
        knots = torch.arange(len(self.knot))
        some, edge, knot = ((piece[..., None] <= knots) & (knots < last[..., None]) & (apart >= 0)[..., None]).nonzero(
            as_tuple=True
        )
        if len(some):
            ends = start[some, edge, None] + torch.arange(size)  # (crossings, size)
            from_here = after[some, :, knot]
            gained = inverse[some] * (self.before[ends.clamp(max=self.length)] - self.before[from_here])
            gained -= self.knot[knot, None] * (ends - from_here) * real[some]
            gained = torch.where(from_here <= ends, gained, 0.0).sum(dim=1) * self.bend[knot]
            under.view(-1).index_add_(0, some * (columns + 1) + edge, gained)
        under.masked_fill_(apart < 0, 0.0)
        count.masked_fill_(apart < 0, 0.0)
        return -under.diff(dim=1), -count.diff(dim=1)

    def diagonals(self) -> Diagonals:
        once, twice = (F.pad(x.cumsum(0), (1, 0)) for x in (self.inverse, self.inverse**2))
        step = max(1, NUMBERS // len(self.slope))
        diagonals = Diagonals(1, self.length)
        diagonals.count = counts(self.length)[None]
        for start in range(0, self.length, step):
            check_time(start / self.length)
            r = torch.arange(start, min(start + step, self.length))
            table = self.table[r]  # (distances,)
            first = self._values(table * self.inverse[r])
            # Piece p holds the rows from edge[p + 1] (included) to edge[p] (excluded), since x decreases with the row.
            edge = torch.searchsorted(self.row, table[:, None] / self.knot, right=False)  # (distances, knots)
            edge = F.pad(F.pad(edge, (1, 0), value=self.length), (0, 1)).maximum(r[:, None]).cummin(dim=1).values
            low, high = edge[:, 1:], edge[:, :-1]
            number, inverse = (high - low).double(), once[high] - once[low]
            offset = self.constant - first[:, None]  # (distances, pieces)
            rise = self.slope * table[:, None]
            squares = offset**2 * number + 2 * offset * rise * inverse + rise**2 * (twice[high] - twice[low])
            diagonals.first[0, r] = first
            diagonals.total[0, r] = (offset * number + rise * inverse).sum(dim=-1)
            diagonals.squares[0, r] = squares.sum(dim=-1)
            ends = torch.stack([low, high - 1]).clamp(max=self.length - 1)  # first and last row of each piece
            value = self.constant + rise * self.inverse[ends]  # (2, distances, pieces)
            empty = number == 0
            diagonals.low[0, r] = value.masked_fill(empty, torch.inf).amin(dim=(0, -1))
            diagonals.high[0, r] = value.masked_fill(empty, -torch.inf).amax(dim=(0, -1))
        return diagonals

    def squared_difference(self, other: HeadValues) -> float | None:
        if not isinstance(other, ScaledValues):
            return None
        pairs = zip(self.form.tensors(), other.form.tensors(), strict=True)
        return 0.0 if all(torch.equal(a, b) for (_, a), (_, b) in pairs) else None

    def extremes_without_first_key(self) -> tuple[float, float]:
        if self.length == 1:
            return super().extremes_without_first_key()
        i = torch.arange(1, self.length)
        farthest = i[:, None] - 1  # the distance of key 1
        after = self._after(i, self.knot[self.turning])
        places = torch.cat([torch.zeros_like(farthest), farthest, after - 1, after], dim=1)
        values = self._values(self.table[places.clamp(min=0).minimum(farthest)] * self.inverse[i, None])
        return float(values.amin()), float(values.amax())

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.table, self.row, self.inverse, self.before))


def has_pieces(form: Scaled) -> bool:
    """Whether a causal form can be reduced by its pieces.

    Neither its table nor its rows may decrease, and x_ij must never decrease with i: each step of the table up to
    distance i is at least that of row i.
    """
    if form.column is not None or form.where is not None:
        return False
    table, row = form.table.double(), form.row[0].double()
    if not (bool((table.diff() >= 0).all()) and bool((row.diff() >= 0).all())):
        return False
    steps = (table[1:] / table[:-1])[: len(row) - 1]  # inf or NaN after a table entry of 0, which is no bound
    least = steps.nan_to_num(nan=torch.inf, posinf=torch.inf).cummin(dim=0).values
    return bool((least * (1 + ROUNDING) >= (row[1:] / row[:-1])[: len(least)]).all())
