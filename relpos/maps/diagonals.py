"""Statistics of a map along its diagonals, and two measures that follow from them.

uniformity          1 − (variance within diagonals / total variance), over the entries that are seen
context dependence  mean squared difference of the same entry for two inputs, over that of two entries picked at random
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

ROUNDING = 4 * torch.finfo(torch.float32).eps  # a spread below this fraction of the largest value is rounding
PER_DECADE, MOST_BINS = 16, 256  # bins of a logarithmic and of a linear axis of distances


def along_diagonals(values: Tensor, first_row: int) -> Tensor:
    """Shift the rows (heads, rows, keys) of a map, from `first_row` on, so that every column holds a single distance.

    Returns (heads, rows, rows + keys − 1): column c holds the distance first_row − (keys − 1) + c, NaN where a row has
    no entry at that distance.
    """
    heads, rows, keys = values.shape
    padded = F.pad(values.flip(-1), (rows - 1, rows - 1), value=torch.nan)
    wide = padded.shape[-1]
    # With a stride of wide − 1 instead of wide, each row is shifted by one column against the row before it.
    return padded.as_strided((heads, rows, rows + keys - 1), (rows * wide, wide - 1, 1), rows - 1)


@dataclass
class Diagonals:
    """Count, mean, spread, minimum and maximum of every diagonal, accumulated a few rows at a time, in float64.

    A diagonal holds the entries of one distance, query − key: 0…length − 1 in a causal map, −(length − 1)…length − 1 in
    both directions. Sums are taken of deviations from the diagonal's first entry, so that they are exactly 0 where all
    entries are equal.
    """

    heads: int
    length: int
    causal: bool = True
    count: Tensor = field(init=False)  # all (heads, distances)
    first: Tensor = field(init=False)
    total: Tensor = field(init=False)
    squares: Tensor = field(init=False)
    low: Tensor = field(init=False)
    high: Tensor = field(init=False)
    extremes: bool = True  # whether low and high are those of every diagonal, not of the complete map

    def __post_init__(self) -> None:
        shape = (self.heads, self.zero + self.length)
        self.count, self.first, self.total, self.squares = torch.zeros(4, *shape, dtype=torch.float64)
        self.low = torch.full(shape, torch.inf, dtype=torch.float64)
        self.high = torch.full(shape, -torch.inf, dtype=torch.float64)

    @classmethod
    def joined(cls, parts: "Sequence[Diagonals]") -> "Diagonals":
        """The diagonals of several heads, of which each is computed alone."""
        first = parts[0]
        all_heads = cls(len(parts), first.length, first.causal, extremes=all(part.extremes for part in parts))
        for name in ("count", "first", "total", "squares", "low", "high"):
            setattr(all_heads, name, torch.cat([getattr(part, name) for part in parts]))
        return all_heads

    @property
    def zero(self) -> int:
        """Column of distance 0."""
        return 0 if self.causal else self.length - 1

    def add(self, values: Tensor, first_row: int) -> None:
        """Add the next rows, from the top: (heads, rows, keys) in float64, NaN where a key is not seen."""
        _, rows, keys = values.shape
        start = torch.where(values.isfinite(), values, 0.0)
        if first_row == 0 and not self.causal:  # the diagonals that begin in the first row
            self.first[:, : self.zero + 1] = start[:, 0].flip(-1)
        self.first[:, self.zero + first_row : self.zero + first_row + rows] = start[:, :, 0]  # and in the first column
        lowest = max(first_row - (keys - 1), -self.zero)  # the lowest distance in these rows that is kept
        here = (slice(None), slice(self.zero + lowest, self.zero + first_row + rows))
        shifted = along_diagonals(values, first_row)[:, :, lowest - first_row + keys - 1 :]
        seen = shifted.isfinite()
        deviation = torch.where(seen, shifted - self.first[here][:, None], 0.0)
        self.count[here] += seen.sum(dim=1)
        self.total[here] += deviation.sum(dim=1)
        self.squares[here] += deviation.square_().sum(dim=1)
        self.low[here] = torch.minimum(self.low[here], torch.where(seen, shifted, torch.inf).amin(dim=1))
        self.high[here] = torch.maximum(self.high[here], torch.where(seen, shifted, -torch.inf).amax(dim=1))

    @property
    def profile(self) -> Tensor:
        """Minimum, mean and maximum of every diagonal: (3, heads, distances), NaN where nothing is seen."""
        return torch.stack([self.low, self.mean, self.high]).masked_fill(self.count == 0, torch.nan)

    @property
    def mean(self) -> Tensor:
        """Mean of every diagonal: (heads, distances), NaN where nothing is seen."""
        return self.first + self.total / self.count

    @property
    def variance(self) -> Tensor:
        """Variance of every diagonal: (heads, distances), NaN where nothing is seen."""
        return ((self.squares - self.total**2 / self.count) / self.count).clamp(min=0)

    @property
    def means(self) -> Tensor:
        """Mean of every head: (heads,)."""
        return (self.mean.nan_to_num() * self.count).sum(dim=1) / self.count.sum(dim=1)

    @property
    def within(self) -> Tensor:
        """Sum of squared deviations of the entries from their diagonal's mean: (heads,)."""
        deviations = self.squares - self.total**2 / self.count.clamp(min=1)
        return deviations.clamp(min=0).sum(dim=1)

    @property
    def between(self) -> Tensor:
        """Sum of squared deviations of the diagonals' means from the head's, per entry: (heads,)."""
        return (self.count * (self.mean.nan_to_num() - self.means[:, None]) ** 2).sum(dim=1)

    @property
    def largest(self) -> Tensor:
        """The largest absolute value: (heads,)."""
        seen = self.count > 0
        return torch.where(seen, torch.maximum(self.low.abs(), self.high.abs()), 0.0).amax(dim=1)

    def varies(self, squares: Tensor) -> Tensor:
        """Whether squared deviations (heads,) exceed rounding."""
        return squares > self.count.sum(dim=1) * (ROUNDING * self.largest) ** 2


def counts(length: int, causal: bool = True) -> Tensor:
    """Number of entries that a map has at every distance: (distances,)."""
    return length - torch.arange(0 if causal else 1 - length, length, dtype=torch.float64).abs()


@dataclass(frozen=True)
class Share:
    """A ratio of two sums of squares, per head and over all heads; None where nothing varies and no ratio exists."""

    heads: list[float | None]
    overall: float | None


def uniformity(diagonals: Diagonals) -> Share:
    """1 for a map that is constant along every diagonal, 0 for a map in which the distance explains nothing."""
    total = diagonals.within + diagonals.between
    varies = diagonals.varies(total)
    return _share(torch.where(varies, total - diagonals.within, 0.0), torch.where(varies, total, 0.0))


def context_dependence(first: Diagonals, second: Diagonals, difference: Tensor) -> Share:
    """0 for the maps of two inputs that are equal, about 1 for two maps that have nothing in common.

    `difference` (heads,) is the sum of squared differences of corresponding entries.
    """
    count = first.count.sum(dim=1)
    apart = (first.means - second.means) ** 2 * count / 2  # squared deviations of both means from their common mean
    # Two entries picked at random from both maps differ, squared, by twice their variance on average.
    spread, other_spread = first.within + first.between, second.within + second.between
    # Two constants have no ratio: the difference between them cancels in the softmax.
    varies = first.varies(spread) | second.varies(other_spread)
    difference = torch.where(first.varies(difference), difference, 0.0)
    return _share(torch.where(varies, difference, 0.0), torch.where(varies, spread + other_spread + apart, 0.0))


def _share(part: Tensor, total: Tensor) -> Share:
    ratios = [float(a / b) if b > 0 else None for a, b in zip(part, total, strict=True)]
    return Share(ratios, float(part.sum() / total.sum()) if total.sum() > 0 else None)


def spread(lowest: int, highest: int, points: int) -> list[int]:
    """At most `points` distances from `lowest` (0 or −highest) on: all near ones, ever fewer of the far ones."""
    if highest - lowest < points:
        return list(range(lowest, highest + 1))
    half = points // 2 if lowest < 0 else points
    far = np.geomspace(1, highest, half * 2)
    near = np.unique(np.concatenate([np.arange(half // 4), far.round().astype(int)]))
    while len(near) > half:  # thin out what is far
        near = np.concatenate([near[: half // 2], near[half // 2 :: 2], near[-1:]])
    near = np.unique(np.append(near, highest))[: points if lowest == 0 else half]
    near[-1] = highest
    return [int(d) for d in (near if lowest == 0 else np.unique(np.concatenate([-near, near])))]


def distance_edges(length: int, log: bool, causal: bool = True) -> NDArray[np.int64]:
    """The first distance of each bin, and one past the last: ascending, with 0 in a bin of its own on a log axis."""
    if log:
        powers = 10 ** (np.arange(math.ceil(PER_DECADE * math.log10(max(length, 2))) + 1) / PER_DECADE)
        edges = np.unique(np.concatenate([[0, 1], np.round(powers).astype(np.int64)]))
        edges = np.append(edges[edges < length], length)
    else:
        step = math.ceil(length / MOST_BINS)
        edges = np.append(np.arange(0, length, step), length)
    return edges if causal else np.unique(np.concatenate([1 - edges[1:], edges]))


def bin_means(values: NDArray[np.float64], edges: NDArray[np.int64], lowest: int = 0) -> NDArray[np.float64]:
    """Means of the bins of values (…, distances), whose first column is distance `lowest`, without NaN: (…, bins)."""
    seen = np.isfinite(values)
    places = edges[:-1] - lowest
    total = np.add.reduceat(np.where(seen, values, 0.0), places, axis=-1)
    count = np.add.reduceat(seen.astype(np.float64), places, axis=-1)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nan))


def bin_centres(edges: NDArray[np.int64], log: bool) -> NDArray[np.float64]:
    """Where a bin is drawn: the middle of its first and last distance, geometric on a log axis."""
    first, last = edges[:-1].astype(np.float64), edges[1:] - 1.0
    if not log:
        return np.asarray((first + last) / 2)
    return np.asarray(np.sign(first + last) * np.sqrt(np.abs(first * last)))
