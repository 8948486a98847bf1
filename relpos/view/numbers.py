"""What a map has along its diagonals, and the two numbers that say how far a caption's claim holds.

uniformity          1 − (variance within diagonals / total variance), over the entries that are seen
context dependence  mean squared difference of the same entry for two inputs, over that of two entries picked at random
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

ROUNDING = 4 * torch.finfo(torch.float32).eps  # a spread of so much of the largest value is none


def along_diagonals(values: Tensor) -> Tensor:
    """Rows of a map (heads, rows, keys), the last one ending on the diagonal, moved so that column r is distance r."""
    heads, rows, keys = values.shape
    padded = F.pad(values.flip(-1), (0, rows), value=torch.nan)  # (heads, rows, keys + rows)
    wide = keys + rows
    # In memory a row begins wide − 1 after the one before: each is moved by one against it.
    return padded.as_strided((heads, rows, keys), (rows * wide, wide - 1, 1), rows - 1)


@dataclass
class Diagonals:
    """Count, mean, spread, minimum and maximum of every diagonal, gathered a few rows at a time, in float64.

    Sums are taken of what deviates from the diagonal's first entry: along equal entries they are exactly 0.
    """

    heads: int
    length: int
    count: Tensor = field(init=False)  # all (heads, length), by distance
    first: Tensor = field(init=False)
    total: Tensor = field(init=False)
    squares: Tensor = field(init=False)
    low: Tensor = field(init=False)
    high: Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = (self.heads, self.length)
        self.count, self.first, self.total, self.squares = torch.zeros(4, *shape, dtype=torch.float64)
        self.low = torch.full(shape, torch.inf, dtype=torch.float64)
        self.high = torch.full(shape, -torch.inf, dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        """The next rows, from the top: (heads, rows, keys) in float64, NaN where a key is not seen."""
        keys = values.shape[2]
        start = values[:, :, 0]  # the first entry of the diagonals that begin here
        self.first[:, keys - values.shape[1] : keys] = torch.where(start.isfinite(), start, 0.0)
        moved = along_diagonals(values)
        seen = moved.isfinite()
        gone = torch.where(seen, moved - self.first[:, None, :keys], 0.0)
        self.count[:, :keys] += seen.sum(dim=1)
        self.total[:, :keys] += gone.sum(dim=1)
        self.squares[:, :keys] += gone.square_().sum(dim=1)
        low = torch.where(seen, moved, torch.inf).amin(dim=1)
        high = torch.where(seen, moved, -torch.inf).amax(dim=1)
        self.low[:, :keys] = torch.minimum(self.low[:, :keys], low)
        self.high[:, :keys] = torch.maximum(self.high[:, :keys], high)

    def fill_from_distances(self, values: Tensor) -> None:
        """All diagonals at once, where each is one value: (heads, length), by distance."""
        seen = values.isfinite()
        self.count = seen * counts(self.length)
        self.first = torch.where(seen, values, 0.0)
        self.low, self.high = torch.where(seen, values, torch.inf), torch.where(seen, values, -torch.inf)

    @property
    def mean(self) -> Tensor:
        """Of every diagonal: (heads, length), NaN where nothing is seen."""
        return self.first + self.total / self.count

    @property
    def means(self) -> Tensor:
        """Of every head: (heads,)."""
        return (self.mean.nan_to_num() * self.count).sum(dim=1) / self.count.sum(dim=1)

    @property
    def within(self) -> Tensor:
        """Squared deviations from the diagonals' means: (heads,)."""
        own = self.squares - self.total**2 / self.count.clamp(min=1)
        return own.clamp(min=0).sum(dim=1)

    @property
    def between(self) -> Tensor:
        """Squared deviations of the diagonals' means from the head's: (heads,)."""
        return (self.count * (self.mean.nan_to_num() - self.means[:, None]) ** 2).sum(dim=1)

    @property
    def largest(self) -> Tensor:
        """The largest absolute value: (heads,)."""
        seen = self.count > 0
        return torch.where(seen, torch.maximum(self.low.abs(), self.high.abs()), 0.0).amax(dim=1)


def counts(length: int) -> Tensor:
    """How many entries a causal map has at every distance: (length,)."""
    return torch.arange(length, 0, -1, dtype=torch.float64)


@dataclass(frozen=True)
class Share:
    """A ratio of two sums of squares, per head and over all; None where nothing varies, so that there is no ratio."""

    heads: list[float | None]
    overall: float | None


def uniformity(found: Diagonals) -> Share:
    """1 for a map that is the same along every diagonal, 0 for one that knows nothing of the distance."""
    total = found.within + found.between
    varies = _varies(total, found)
    return _share(torch.where(varies, total - found.within, 0.0), torch.where(varies, total, 0.0))


def context_dependence(one: Diagonals, other: Diagonals, difference: Tensor) -> Share:
    """0 for maps that are the same for both inputs, about 1 for maps that have nothing in common.

    difference: the sum of squared differences of the same entry, a head (heads,).
    """
    count = one.count.sum(dim=1)
    apart = (one.means - other.means) ** 2 * count / 2  # of the two means from the common one, over both maps
    # Two entries picked at random from both maps differ, squared, by twice their variance on average.
    own, others = one.within + one.between, other.within + other.between
    # Two constants have no ratio: what differs between them cancels in the softmax.
    varies = _varies(own, one) | _varies(others, other)
    return _share(torch.where(varies, difference, 0.0), torch.where(varies, own + others + apart, 0.0))


def _varies(total: Tensor, found: Diagonals) -> Tensor:
    """Whether the squared deviations of a head's map, `total` (heads,), are more than rounding."""
    return total > found.count.sum(dim=1) * (ROUNDING * found.largest) ** 2


def _share(part: Tensor, total: Tensor) -> Share:
    ratios = [float(a / b) if b > 0 else None for a, b in zip(part, total, strict=True)]
    return Share(ratios, float(part.sum() / total.sum()) if total.sum() > 0 else None)
