"""Confidence intervals by drawing documents again and again."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

DRAWS = 1000
AT_ONCE = 2**22  # weights of documents that exist at a time


def interval(values: NDArray[np.float64], level: float = 0.95) -> tuple[float, float]:
    """Between which two numbers the middle of the draws lies: `level` of them."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def bootstrap(*sums: NDArray[Any], seed: int = 0, draws: int = DRAWS) -> list[NDArray[np.float64]]:
    """Each sum over documents (documents, …), over as many documents drawn with replacement: (draws, …).

    All sums see the same draws, so that their ratios and differences can be taken draw by draw.
    """
    documents = len(sums[0])
    generator = np.random.default_rng(seed)
    found: list[list[NDArray[np.float64]]] = [[] for _ in sums]
    for start in range(0, draws, max(1, AT_ONCE // documents)):
        some = min(draws - start, max(1, AT_ONCE // documents))
        # How often each document is drawn. (some, documents)
        weights = generator.multinomial(documents, np.full(documents, 1 / documents), size=some).astype(np.float64)
        for parts, values in zip(found, sums, strict=True):
            parts.append(np.tensordot(weights, values.astype(np.float64), axes=1))
    return [np.concatenate(parts) for parts in found]
