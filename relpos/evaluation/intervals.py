"""Confidence intervals: the units of a text (documents, or blocks of a single one), resampled with replacement."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relpos.runs.results import UnitSums
from relpos.text.tokens import Tokens

BLOCKS = 100  # of a single document, at most
BLOCK = 256  # tokens per block, at least: neighbouring tokens are not independent
KEPT = 500  # units in a file, at most; if there are more, neighbours are added up
FEW = 10  # units: an interval over fewer is too narrow, and no test is made on them
DRAWS = 1000
AT_ONCE = 2**22  # weights of documents in memory at a time


@dataclass(frozen=True)
class Units:
    """Stretches of a text that are treated as independent of each other."""

    starts: NDArray[np.int64]  # (units,), the index of the first token of each
    block: int | None  # tokens per block; None if the units are documents

    @property
    def name(self) -> str:
        """What the units are: documents or blocks."""
        return "documents" if self.block is None else "blocks"

    def of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of the unit that each token belongs to.

        Args:
            places: Indices of tokens in the text, of any shape.

        Returns:
            In the same shape.
        """
        numbers: NDArray[np.int64] = np.searchsorted(self.starts, places, side="right") - 1
        return numbers


def units_of(text: Tokens, longest: int) -> Units:
    """The documents of a text; if it is a single one, blocks that hold at least one window of the longest length."""
    if len(text.starts) > 1:
        return Units(np.asarray(text.starts, dtype=np.int64), None)
    least = max(BLOCK, -(-len(text) // BLOCKS))
    block = longest * -(-least // longest)  # a multiple: the tokens of one window stay together
    return Units(np.arange(0, len(text), block, dtype=np.int64), block)


def warnings(units: Units, counts: list[int]) -> list[str]:
    """What a reader of the intervals must know.

    Args:
        units: What the intervals are over.
        counts: How many units were scored, for each length that was measured.

    Returns:
        Sentences; none if all is well.
    """
    if not counts:
        return []
    sentences, least = [], min(counts)
    if units.block is not None and least > 1:
        sentences.append(
            f"The text is one document: the 95 % intervals are over its blocks of {units.block:,} tokens (at least "
            f"{least}), and say how the numbers would move within this text, not with another."
        )
    if 1 < least < FEW:
        sentences.append(
            f"The 95 % intervals rest on {least} {units.name}: over fewer than {FEW} they are too narrow to be trusted."
        )
    return sentences


def unit_sums(
    units: Units, numbers: NDArray[np.int64], sums: NDArray[np.float64], counts: NDArray[np.int64]
) -> UnitSums:
    """The loss and the tokens of each unit, kept for comparing models on the same text.

    Args:
        units: All units of the text.
        numbers: The numbers of the units that have scored tokens, (scored units,).
        sums: The sum of the losses of each, (scored units,).
        counts: The scored tokens of each, (scored units,).

    Returns:
        "number", "loss" (a sum) and "tokens", one entry per unit or group of neighbouring units.
    """
    total = len(units.starts)
    groups, place = np.unique(numbers if total <= KEPT else numbers * KEPT // total, return_inverse=True)
    return {
        "number": groups.tolist(),
        "loss": np.bincount(place, weights=sums).round(6).tolist(),
        "tokens": np.bincount(place, weights=counts).astype(np.int64).tolist(),
    }


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
