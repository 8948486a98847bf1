"""Confidence intervals: the units of a text (documents, or blocks of a single one), resampled with replacement."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from relpos.runs.results import Bin, Row, UnitSums
from relpos.text.tokens import Tokens

if TYPE_CHECKING:
    from relpos.evaluation.scoring import Losses

BLOCKS = 100  # of a single document, at most
BLOCK = 256  # tokens per block, at least: neighbouring tokens are not independent
KEPT = 500  # units in a file, at most; if there are more, neighbours are added up
FEW = 10  # units: an interval over fewer is too narrow, and no test is made on them
DRAWS = 1000
AT_ONCE = 2**22  # weights of documents in memory at a time
FIRST_BIN = 16  # positions; from there on, two bins per octave


@dataclass(frozen=True)
class Units:
    """Stretches of a text that are treated as independent of each other."""

    starts: NDArray[np.int64]  # (units,), the index of the first token of each
    block: int | None  # tokens per block; None if the units are documents

    @property
    def name(self) -> str:
        return "documents" if self.block is None else "blocks"

    def of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of the unit that each token belongs to; `places` are indices of tokens, of any shape."""
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
    """Sentences that a reader of the intervals must know; `counts` of units, for each length that was measured."""
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
    """The loss and the tokens of each unit or group of neighbouring units, kept for comparing models on the same text.

    `numbers`, `sums` and `counts` are of the units that have scored tokens, (scored units,).
    """
    total = len(units.starts)
    groups, place = np.unique(numbers if total <= KEPT else numbers * KEPT // total, return_inverse=True)
    return {
        "number": groups.tolist(),
        "loss": np.bincount(place, weights=sums).round(6).tolist(),
        "tokens": np.bincount(place, weights=counts).astype(np.int64).tolist(),
    }


def interval(values: NDArray[np.float64], level: float = 0.95) -> tuple[float, float]:
    """The interval that holds the middle share `level` of the values, one per resample."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def bootstrap(*sums: NDArray[Any], seed: int = 0, draws: int = DRAWS) -> list[NDArray[np.float64]]:
    """Add up values over resamples of the documents; each resample has as many documents as the original.

    All sums use the same resamples, so that their ratios and differences can be computed resample by resample: each
    (documents, …) in `sums` becomes its totals, (draws, …).

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


# -- The numbers of a length, with their intervals


def bin_edges(length: int) -> NDArray[np.int64]:
    """The borders of the bins of positions: 0, 16, then two per octave, and the length."""
    steps = [round(FIRST_BIN * 2 ** (step / 2)) for step in range(2 * length.bit_length())]
    return np.array([0, *(step for step in steps if step < length), length])


def row_of(length: int, windows: int, losses: "Losses", units: Units, size: int | None, seed: int) -> Row:
    """The numbers of a length. `size` is the number of bytes scored. A single document or block has no interval."""
    loss = losses.mean
    if not loss < math.log(np.finfo(np.float64).max):
        raise ValueError(f"the loss is {loss}: the model is damaged, or this length is far beyond what it can compute.")
    low, high = None, None
    if len(losses.counts) > 1:
        sums, counts = bootstrap(losses.sums.sum(1), losses.counts.sum(1), seed=seed)
        low, high = interval(np.exp(sums / counts))
    tokens = int(losses.counts.sum())
    return {
        "length": length,
        "loss": loss,
        "perplexity": math.exp(loss),
        "low": low,
        "high": high,
        "bits_per_byte": loss * tokens / math.log(2) / size if size else None,
        "windows": windows,
        "documents": len(losses.units) if units.block is None else 1,
        "blocks": None if units.block is None else len(losses.units),
        "tokens": tokens,
        "bytes": size,
        "seconds": round(losses.seconds, 3),
        "tokens_per_second": round(losses.read / losses.seconds, 1),  # tokens read, which may be more than those scored
        "peak_memory_bytes": losses.peak,
        "units": unit_sums(units, losses.units, losses.sums.sum(1), losses.counts.sum(1)),
        "error": None,
    }


def bins_of(edges: NDArray[np.int64], losses: "Losses", control: "Losses", seed: int) -> list[Bin]:
    """Loss by position and that of the control, with intervals of the loss and of the difference."""
    resamples = bootstrap(losses.sums, losses.counts, control.sums, seed=seed) if len(losses.counts) > 1 else None
    bins: list[Bin] = []
    for number, (begin, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        tokens = int(losses.counts[:, number].sum())
        loss, other = (float(measured.sums[:, number].sum()) / tokens for measured in (losses, control))
        entry: Bin = {
            "from": begin,
            "to": end,
            "tokens": tokens,
            "loss": loss,
            "low": None,
            "high": None,
            "control": other,
            "difference": loss - other,
            "difference_low": None,
            "difference_high": None,
        }
        if resamples is not None:
            sums, counts, others = (values[:, number] for values in resamples)
            entry["low"], entry["high"] = interval(sums / counts)
            entry["difference_low"], entry["difference_high"] = interval((sums - others) / counts)
        bins.append(entry)
    return bins
