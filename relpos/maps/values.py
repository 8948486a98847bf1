"""The values of one head: any rectangle of its map as entries or reduced to square cells, and its diagonals.

A cell of size s in row r and column c holds the queries r·s … r·s + s − 1 and the keys c·s … c·s + s − 1, as far as
they exist. Nothing here materialises length × length values.
"""

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.maps.diagonals import Diagonals

ENTRIES = 2**20  # values that are materialised at a time: 4 MB in float32
ONE_PASS = 2048  # tokens up to which a pass over all entries takes less time than some diagonals, each by itself


class CancelledError(Exception):
    """Nobody waits for the result any more."""


@dataclass
class Work:
    """A computation that somebody waits for: its limit, how far its longest loop is, and whether it was cancelled."""

    deadline: float  # by time.monotonic
    done: float = 0.0  # of the loop that runs
    cancelled: bool = False


_work: ContextVar[Work | None] = ContextVar("work", default=None)  # None: without a limit


@contextmanager
def within(seconds: float, work: Work | None = None) -> Iterator[None]:
    """Limit the time of what is computed inside; `work` then tells how far it is, and can cancel it."""
    work = work or Work(0.0)
    work.deadline = time.monotonic() + seconds
    token = _work.set(work)
    try:
        yield
    finally:
        _work.reset(token)


def check_time(done: float | None = None) -> None:
    """Called in loops over long maps, with the share that is done: raises if the time is up, or nobody waits."""
    work = _work.get()
    if work is None:
        return
    if done is not None:
        work.done = done
    if work.cancelled:
        raise CancelledError
    if time.monotonic() > work.deadline:
        raise TimeoutError("this takes too long to compute: give a smaller length.")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run what is inside on this many of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def all_cores() -> AbstractContextManager[None]:
    """For what is large enough for all cores, unlike a tile: a model that reads or writes, a complete map."""
    return threads(max(torch.get_num_threads(), os.cpu_count() or 1))


def one_thread() -> AbstractContextManager[None]:
    """For many small sums: several threads take up to six times as long on a busy machine."""
    return threads(1)


class Cells(NamedTuple):
    """Cells of a map: minimum, sum and maximum of the entries that are seen, and their number, (rows, columns) each."""

    low: Tensor  # inf where nothing is seen
    total: Tensor  # float64
    high: Tensor  # −inf where nothing is seen
    seen: Tensor  # float64

    @staticmethod
    def empty(rows: int, columns: int) -> "Cells":
        total, seen = torch.zeros(2, rows, columns, dtype=torch.float64)
        return Cells(total + torch.inf, total, total - torch.inf, seen)

    def put(self, row: int, column: int, part: "Cells") -> None:
        """Add the entries of other cells, which begin at `row` and `column` of these."""
        rows, columns = part.low.shape
        here = (slice(row, row + rows), slice(column, column + columns))
        self.low[here] = torch.minimum(self.low[here], part.low)
        self.high[here] = torch.maximum(self.high[here], part.high)
        self.total[here] += part.total
        self.seen[here] += part.seen

    def part(self, row: int, rows: int, column: int, columns: int) -> "Cells":
        return Cells(*(x[row : row + rows, column : column + columns] for x in self))

    def halved(self) -> "Cells":
        """The cells of twice the size."""
        rows, columns = self.low.shape
        fills = (torch.inf, 0.0, -torch.inf, 0.0)
        low, total, high, seen = (
            F.pad(x, (0, columns % 2, 0, rows % 2), value=fill).view(-(-rows // 2), 2, -(-columns // 2), 2)
            for x, fill in zip(self, fills, strict=True)
        )
        return Cells(low.amin(dim=(1, 3)), total.sum(dim=(1, 3)), high.amax(dim=(1, 3)), seen.sum(dim=(1, 3)))

    @property
    def planes(self) -> Tensor:
        """Minimum, mean and maximum in float32, NaN where nothing is seen: (3, rows, columns)."""
        planes = torch.stack([self.low.float(), (self.total / self.seen).float(), self.high.float()])
        return planes.masked_fill(self.seen == 0, torch.nan) + 0.0  # no −0


class HeadValues(ABC):
    """The values of one head, computed on request."""

    length: int
    causal: bool  # whether no query sees a key after its own
    closed: bool = False  # whether cells of any size and the sums along diagonals follow from the form
    together: int = 1  # heads whose entries are computed together

    @abstractmethod
    def block(self, first: int, end: int, left: int, right: int) -> Tensor:
        """The entries of the queries first…end − 1 and the keys left…right − 1, NaN where a key is not seen."""

    def cells(self, row: int, rows: int, column: int, columns: int, size: int) -> Cells:
        """Reduce rows × columns cells of `size` queries and keys, from `row` and `column` on."""
        cells = Cells.empty(rows, columns)
        step = max(1, ENTRIES // (columns * size * size))
        for first in range(0, rows, step):
            check_time(first / rows)
            last = min(first + step, rows)
            # Of a causal map, columns before these rows of cells are seen by all of their queries, those after by none.
            before, after = 0, columns
            if self.causal:
                before, after = (min(max(row + place - column, 0), columns) for place in (first, last))
            for start, stop in ((0, before), (before, after)):
                if start == stop:
                    continue
                queries = ((row + first) * size, min((row + last) * size, self.length))
                keys = ((column + start) * size, min((column + stop) * size, self.length))
                cells.put(first, start, reduce_block(self.block(*queries, *keys), last - first, stop - start, size))
        return cells

    def diagonals(self) -> Diagonals:
        """Sums along every diagonal, exact: in one pass over all entries, or from the form."""
        diagonals = Diagonals(1, self.length, self.causal)
        for first, end in self.row_blocks(ENTRIES // 4):
            values = self.block(first, end, 0, end if self.causal else self.length)
            diagonals.add(values.double()[None], first)
        return diagonals

    def diagonal(self, distance: int) -> Tensor | None:
        """The entries at a distance, in order, NaN where a key is not seen; None if that needs a pass over all."""
        return None

    def profile(self, distances: Tensor) -> Tensor:
        """Minimum, mean and maximum of the entries at some distances, exact: (3, distances), NaN where none is seen."""
        if self.length <= ONE_PASS or self.diagonal(0) is None:
            diagonals = self.diagonals()
            diagonals = diagonals if diagonals.extremes else HeadValues.diagonals(self)
            return diagonals.profile[:, 0, distances + diagonals.zero] + 0.0  # no −0
        profile = torch.full((3, len(distances)), torch.nan, dtype=torch.float64)
        with one_thread():  # many small sums
            for place, distance in enumerate(distances.tolist()):
                check_time(place / len(distances))
                values = self.diagonal(distance)
                assert values is not None
                seen = values.isfinite()
                values = values if bool(seen.all()) else values[seen]
                if len(values):
                    low, high = values.aminmax()
                    profile[:, place] = torch.stack([low.double(), values.mean(dtype=torch.float64), high.double()])
        return profile + 0.0  # no −0

    def squared_difference(self, other: "HeadValues") -> float | None:
        """The sum of squared differences from another head's entries; None if that needs a pass over all."""
        return None

    def extremes(self, left: int, right: int) -> tuple[float, float]:
        """The smallest and the largest value of the keys left…right − 1, entry by entry."""
        low, high = math.inf, -math.inf
        for first, end in self.row_blocks(ENTRIES, width=right - left):
            values = self.block(first, end, left, right)
            seen = values.isfinite()
            low = min(low, float(torch.where(seen, values, torch.inf).amin()))
            high = max(high, float(torch.where(seen, values, -torch.inf).amax()))
        return low, high

    def extremes_without_first_key(self) -> tuple[float, float]:
        """The smallest and the largest value of the keys from 1 on; of all keys if there is no other."""
        return self.extremes(min(1, self.length - 1), self.length)

    def mean_entropy(self) -> float:
        """The mean entropy of the rows in nats, if these are attention weights."""
        total = 0.0
        for first, end in self.row_blocks(ENTRIES):
            weights = self.block(first, end, 0, end if self.causal else self.length).double().nan_to_num(0.0, 0.0, 0.0)
            total += float(torch.special.entr(weights.clamp(min=0)).sum())
        return total / self.length

    def row_blocks(self, entries: int, size: int = 1, width: int | None = None) -> Iterator[tuple[int, int]]:
        """First row, and past the last, of blocks of about this many entries, which do not cut cells of `size` rows.

        A block may be a part of one row of cells. `width` is the number of keys per row, all by default.
        """
        rows = max(1, entries // ((self.length if width is None else width) * self.together))
        wide = rows // size * size or size  # rows of complete rows of cells
        for top in range(0, self.length, wide):
            bottom = min(top + wide, self.length)
            for first in range(top, bottom, min(rows, wide)):
                check_time(first / self.length)
                yield first, min(first + min(rows, wide), bottom)

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps besides the layer's own tensors."""
        return 0


class TensorValues(HeadValues):
    """Values (queries, keys) that exist already; what is not finite is not seen."""

    def __init__(self, values: Tensor) -> None:
        self.length = len(values)
        self.values = torch.where(values.isfinite(), values, torch.nan)
        self.causal = not bool(self.values.isfinite().triu(1).any())

    def block(self, first: int, end: int, left: int, right: int) -> Tensor:
        return self.values[first:end, left:right].float()

    def diagonal(self, distance: int) -> Tensor:
        return self.values.diagonal(-distance)


class Difference(HeadValues):
    """a − b, where both are seen, of two heads of the same length."""

    def __init__(self, a: HeadValues, b: HeadValues) -> None:
        self.length, self.causal, self.a, self.b = a.length, a.causal or b.causal, a, b

    def block(self, first: int, end: int, left: int, right: int) -> Tensor:
        return self.a.block(first, end, left, right) - self.b.block(first, end, left, right)

    def diagonal(self, distance: int) -> Tensor | None:
        a, b = self.a.diagonal(distance), self.b.diagonal(distance)
        return None if a is None or b is None else a - b


def reduce_block(values: Tensor, rows: int, columns: int, size: int) -> Cells:
    """Reduce entries (queries, keys) to rows × columns cells; what is missing at the end counts as not seen."""
    queries, keys = values.shape
    if size == 1:
        seen = values.isfinite()
        low, high = torch.where(seen, values, torch.inf), torch.where(seen, values, -torch.inf)
        return Cells(low, torch.where(seen, values, 0.0).double(), high, seen.double())
    tall = min(size, queries)  # a single row of cells may be cut off
    if (queries, keys) == (rows * tall, columns * size):
        by_row = values.view(rows, tall, keys)  # rows are reduced before columns, along memory, which is faster
        low, high = (x.view(rows, columns, size) for x in (by_row.amin(dim=1), by_row.amax(dim=1)))
        low, high = low.amin(dim=-1), high.amax(dim=-1)
        if bool((low.isfinite() & high.isfinite()).all()):  # otherwise some entries are not seen
            total = by_row.sum(dim=1).view(rows, columns, size).double().sum(dim=-1)
            return Cells(low, total, high, torch.full((rows, columns), float(tall * size), dtype=torch.float64))
    values = F.pad(values, (0, columns * size - keys, 0, rows * tall - queries), value=torch.nan)
    seen = values.isfinite().view(rows, tall, -1)
    by_row = values.view(rows, tall, -1)
    low = torch.where(seen, by_row, torch.inf).amin(dim=1)
    high = torch.where(seen, by_row, -torch.inf).amax(dim=1)
    total, count = torch.where(seen, by_row, 0.0).sum(dim=1).double(), seen.sum(dim=1).double()
    low, high, total, count = (x.view(rows, columns, size) for x in (low, high, total, count))
    return Cells(low.amin(dim=-1), total.sum(dim=-1), high.amax(dim=-1), count.sum(dim=-1))
