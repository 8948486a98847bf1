"""A paired test of whether encodings differ: a bootstrap over documents, and Student's t over the seeds of training.

At each length every encoding is compared with the one of the lowest perplexity, on the same documents. Each resample
draws documents with replacement, the same ones for both encodings. There are too few seeds to resample: the mean
difference over n seeds is taken to have Student's t distribution with n − 1 degrees of freedom, and a value drawn from
it is added to every resample.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relpos.evaluation.intervals import FEW, bootstrap, interval
from relpos.runs.results import Row

LEVEL = 0.95  # confidence level of all comparisons at a length together
DRAWS = 10_000  # resamples; many, because with many comparisons the bounds lie far out in the tails


@dataclass(frozen=True)
class Difference:
    """The mean loss per token of an encoding minus that of the lowest, and its confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        """Whether the interval does not contain 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Standing:
    """How the encodings compare at one length.

    Attributes:
        lowest: The encoding with the lowest mean perplexity.
        differences: The difference of every other encoding from the lowest.
        unmarked: Why no encoding is marked in the table; None if some are.
    """

    lowest: str
    differences: Mapping[str, Difference]
    unmarked: str | None

    @property
    def marked(self) -> set[str]:
        """The lowest encoding and all that do not differ from it significantly; empty if `unmarked` says why."""
        if self.unmarked is not None:
            return set()
        return {self.lowest, *(name for name, difference in self.differences.items() if not difference.significant)}


def standing(rows: Mapping[str, Mapping[int, Row]], seed: int = 0) -> Standing | None:
    """Compare the encodings at one length.

    Args:
        rows: The measured rows by encoding and by seed of training.
        seed: The seed of the bootstrap.

    Returns:
        The comparison; None if there are no rows.
    """
    known = {encoding: seeds for encoding, seeds in rows.items() if seeds}
    if not known:
        return None
    means = {
        encoding: statistics.fmean(float(row["perplexity"]) for row in seeds.values())
        for encoding, seeds in known.items()
    }
    lowest = min(means, key=lambda encoding: means[encoding])
    others = [encoding for encoding in known if encoding != lowest]
    if not others:
        return Standing(lowest, {}, "only one encoding has a number")
    if not _same_tokens([row for seeds in known.values() for row in seeds.values()]):
        return Standing(lowest, {}, "the trials did not score the same tokens")
    common = {encoding: sorted(known[encoding].keys() & known[lowest].keys()) for encoding in others}
    if not all(common.values()):
        return Standing(lowest, {}, "no seed is finished for all encodings")
    differences = _differences(known, lowest, common, seed)
    reason = _untested(known, common)
    if reason is None and not any(difference.significant for difference in differences.values()):
        reason = "no encoding differs significantly from the lowest"
    return Standing(lowest, differences, reason)


def _untested(known: Mapping[str, Mapping[int, Row]], common: Mapping[str, Sequence[int]]) -> str | None:
    units = len(next(iter(next(iter(known.values())).values()))["units"]["number"])
    if units < FEW:
        return f"{units} documents or blocks are too few for a test (at least {FEW})"
    if min(len(seeds) for seeds in common.values()) < 2:
        return "with one seed the variation between seeds is not known (at least two are needed)"
    return None


def _same_tokens(rows: Sequence[Row]) -> bool:
    first = rows[0]["units"]
    return all(row["units"][key] == first[key] for row in rows for key in ("number", "tokens"))


def _differences(
    known: Mapping[str, Mapping[int, Row]], lowest: str, common: Mapping[str, Sequence[int]], seed: int
) -> dict[str, Difference]:
    level = 1 - (1 - LEVEL) / len(common)  # Bonferroni
    tokens = np.array(next(iter(known[lowest].values()))["units"]["tokens"], dtype=np.float64)  # (units,)
    by_seed = {
        encoding: np.array([_losses(known[encoding][s]) - _losses(known[lowest][s]) for s in seeds])  # (seeds, units)
        for encoding, seeds in common.items()
    }
    means = np.stack([differences.mean(0) for differences in by_seed.values()], axis=1)  # (units, encodings)
    sums, counts = bootstrap(means, tokens, seed=seed, draws=DRAWS)
    generator = np.random.default_rng(seed)
    results = {}
    for column, (encoding, differences) in enumerate(by_seed.items()):
        each = differences.sum(1) / tokens.sum()  # (seeds,)
        drawn = sums[:, column] / counts
        if len(each) > 1:
            deviation = each.std(ddof=1) / len(each) ** 0.5
            drawn = drawn + deviation * generator.standard_t(len(each) - 1, size=DRAWS)
        results[encoding] = Difference(float(each.mean()), *interval(drawn, level))
    return results


def _losses(row: Row) -> NDArray[np.float64]:
    return np.array(row["units"]["loss"], dtype=np.float64)
