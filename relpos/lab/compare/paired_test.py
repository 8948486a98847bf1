"""Whether encodings differ: a paired bootstrap over the documents that all have read, and the seeds of training.

At each length every encoding is compared with the lowest on the same documents. Documents are drawn with replacement,
the same ones for both. Between seeds too few numbers are known to be drawn from: their mean difference has Student's
t distribution, with one degree of freedom fewer than there are seeds, and its width is added to every draw.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relpos.lab.evaluate.bootstrap import bootstrap, interval
from relpos.lab.evaluate.units import FEW

LEVEL = 0.95  # of all comparisons at a length together
DRAWS = 10_000  # the more comparisons, the further out in the tails the bounds are


@dataclass(frozen=True)
class Difference:
    """Of the mean loss per token: an encoding's minus the lowest's."""

    mean: float
    low: float
    high: float

    @property
    def passes(self) -> bool:
        """Whether 0 is outside the interval."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Standing:
    """The encodings at one length."""

    lowest: str  # the encoding with the lowest mean perplexity
    differences: Mapping[str, Difference]  # of every other from the lowest
    unmarked: str | None  # why no encoding is marked

    @property
    def marked(self) -> set[str]:
        """The lowest, and all that are not told apart from it; none where nothing is, or nothing can be tested."""
        if self.unmarked is not None:
            return set()
        return {self.lowest, *(name for name, difference in self.differences.items() if not difference.passes)}


Row = Mapping[str, Any]  # of relpos.lab.evaluate.evaluation, with its units


def standing(rows: Mapping[str, Mapping[int, Row]], seed: int = 0) -> Standing | None:
    """Compare the encodings at one length.

    Args:
        rows: by encoding and seed of training, those that have a number.
        seed: of the draws.

    Returns:
        What the rows allow to say; None where none has a number.
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
    if any(not row.get("units") for seeds in known.values() for row in seeds.values()):
        return Standing(lowest, {}, "the losses of each document were not kept by the version that measured them")
    if not _same_tokens([row for seeds in known.values() for row in seeds.values()]):
        return Standing(lowest, {}, "the parts did not score the same tokens")
    common = {encoding: sorted(known[encoding].keys() & known[lowest].keys()) for encoding in others}
    if not all(common.values()):
        return Standing(lowest, {}, "no seed is finished for all encodings")
    differences = _differences(known, lowest, common, seed)
    reason = _untested(known, common)
    if reason is None and not any(difference.passes for difference in differences.values()):
        reason = "no encoding is told apart from the lowest"
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
    found = {}
    for column, (encoding, differences) in enumerate(by_seed.items()):
        each = differences.sum(1) / tokens.sum()  # (seeds,)
        drawn = sums[:, column] / counts
        if len(each) > 1:
            deviation = each.std(ddof=1) / len(each) ** 0.5
            drawn = drawn + deviation * generator.standard_t(len(each) - 1, size=DRAWS)
        found[encoding] = Difference(float(each.mean()), *interval(drawn, level))
    return found


def _losses(row: Row) -> NDArray[np.float64]:
    return np.array(row["units"]["loss"], dtype=np.float64)
