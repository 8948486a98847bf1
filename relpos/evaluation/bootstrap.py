"""Confidence intervals by the bootstrap: resamples of the documents, drawn with replacement."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

DRAWS = 1000
AT_ONCE = 2**22  # weights of documents in memory at a time


def interval(values: NDArray[np.float64], level: float = 0.95) -> tuple[float, float]:
    """The interval that holds the middle share `level` of the values.

    Args:
        values: One value per resample.
        level: The share, 0.95 for a 95 % interval.

    Returns:
        The lower and the upper bound.
    """
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def bootstrap(*sums: NDArray[Any], seed: int = 0, draws: int = DRAWS) -> list[NDArray[np.float64]]:
    """Add up values over resamples of the documents; each resample has as many documents as the original.

    All sums use the same resamples, so that their ratios and differences can be computed resample by resample.

    Args:
        sums: Values per document, each (documents, …).
        seed: Seed of the resamples.
        draws: How many resamples.

    Returns:
        For each of `sums`, its total over each resample, (draws, …).

    Example:
        >>> losses, tokens = bootstrap(np.array([8.0, 6.0]), np.array([4, 2]))
        >>> low, high = interval(losses / tokens)
    """
    documents = len(sums[0])
    generator = np.random.default_rng(seed)
    totals: list[list[NDArray[np.float64]]] = [[] for _ in sums]
    for start in range(0, draws, max(1, AT_ONCE // documents)):
        count = min(draws - start, max(1, AT_ONCE // documents))
        # How often each document is drawn. (count, documents)
        weights = generator.multinomial(documents, np.full(documents, 1 / documents), size=count).astype(np.float64)
        for parts, values in zip(totals, sums, strict=True):
            parts.append(np.tensordot(weights, values.astype(np.float64), axes=1))
    return [np.concatenate(parts) for parts in totals]
