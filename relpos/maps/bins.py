"""Distances grouped for a picture: of equal width, or of equal width on a logarithmic axis."""

import math

import numpy as np
from numpy.typing import NDArray

PER_DECADE = 16  # bins of a logarithmic axis
MOST = 256  # bins of a linear axis


def distance_edges(length: int, log: bool, causal: bool = True) -> NDArray[np.int64]:
    """The first distance of each bin, and one past the last: ascending, with 0 in a bin of its own on a log axis."""
    if log:
        powers = 10 ** (np.arange(math.ceil(PER_DECADE * math.log10(max(length, 2))) + 1) / PER_DECADE)
        edges = np.unique(np.concatenate([[0, 1], np.round(powers).astype(np.int64)]))
        edges = np.append(edges[edges < length], length)
    else:
        step = math.ceil(length / MOST)
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
