"""The numbers of a comparison: means over seeds, a paired test at each length, costs, and sentences on what they show.

At each length every encoding is compared with the one of the lowest perplexity, on the same documents. Each resample
draws documents with replacement, the same ones for both encodings. There are too few seeds to resample: the mean
difference over n seeds is taken to have Student's t distribution with n − 1 degrees of freedom, and a value drawn from
it is added to every resample.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relpos.comparison.comparison import (
    Comparison,
    TableProtocol,
    Trial,
    TrialRecord,
    complete,
    finished,
    read_record,
)
from relpos.evaluation.intervals import FEW, bootstrap, interval
from relpos.runs.results import Row

LEVEL = 0.95  # confidence level of all comparisons at a length together
ENOUGH = 500_000  # tokens of training, about as many as in the table of docs/comparison.md
SEVERAL = 3  # seeds
DRAWS = 10_000  # resamples; many, because with many comparisons the bounds lie far out in the tails

Records = Mapping[Trial, TrialRecord]
Perplexities = dict[str, dict[int, "Cell"]]  # by encoding and length


@dataclass(frozen=True)
class Cell:
    """The perplexities of one encoding at one length."""

    values: tuple[float, ...]  # one per seed
    missing: str  # what to print if there are no values: "refused", "failed", or "–" for not measured yet

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation over the seeds; None with fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def __str__(self) -> str:
        if self.mean is None:
            return self.missing
        deviation = "" if self.deviation is None else f" ± {format_number(self.deviation, self.mean)}"
        return format_number(self.mean) + deviation


def read_records(comparison: Comparison, out: Path) -> dict[Trial, TrialRecord]:
    """Read the records of all trials."""
    return {trial: read_record(out, trial) for trial in comparison.trials()}


def rows_of(record: TrialRecord, comparison: Comparison, protocol: TableProtocol = "windows") -> list[Row]:
    """The rows of a trial's evaluation by a protocol.

    Empty unless all lengths are measured: the longest length decides which tokens are scored.
    """
    return record[protocol]["rows"] if complete(record, comparison, protocol) else []


def measured_rows(
    comparison: Comparison, records: Records, encoding: str, length: int, protocol: TableProtocol = "windows"
) -> dict[int, Row]:
    """The evaluation rows of an encoding at a length that have a perplexity, by seed."""
    return {
        trial.seed: row
        for trial in comparison.trials_of(encoding)
        for row in rows_of(records[trial], comparison, protocol)
        if row["length"] == length and not row["error"]
    }


def make_table(comparison: Comparison, records: Records, protocol: TableProtocol = "windows") -> Perplexities:
    """The perplexities of a comparison by encoding and length: `table["alibi"][512].mean`."""
    return {
        encoding: {length: _cell(comparison, records, encoding, length, protocol) for length in comparison.lengths}
        for encoding in comparison.encodings
    }


def _cell(comparison: Comparison, records: Records, encoding: str, length: int, protocol: TableProtocol) -> Cell:
    of_encoding = [records[trial] for trial in comparison.trials_of(encoding)]
    rows = [row for record in of_encoding for row in rows_of(record, comparison, protocol) if row["length"] == length]
    if any(row["error"] for row in rows):
        missing = "refused"
    else:
        missing = "failed" if any(record.get("error") for record in of_encoding) else "–"
    return Cell(tuple(float(row["perplexity"]) for row in rows if not row["error"]), missing)


def bits_per_byte(comparison: Comparison, records: Records, encoding: str, length: int) -> str:
    """Bits per byte as text: the mean and deviation over the seeds."""
    rows = measured_rows(comparison, records, encoding, length).values()
    values = [float(row["bits_per_byte"]) for row in rows if row["bits_per_byte"] is not None]
    if not values:  # the tokenizer is not byte-level
        return "–"
    return f"{statistics.fmean(values):.4f}" + (f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else "")


# -- The paired test


@dataclass(frozen=True)
class Difference:
    """The mean loss per token of an encoding minus that of the lowest, and its confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Standing:
    """How the encodings compare at one length."""

    lowest: str  # the encoding with the lowest mean perplexity
    differences: Mapping[str, Difference]  # of every other encoding from the lowest
    unmarked: str | None  # why no encoding is marked in the table; None if some are

    @property
    def marked(self) -> set[str]:
        """The lowest encoding and all that do not differ from it significantly; empty if `unmarked` says why."""
        if self.unmarked is not None:
            return set()
        return {self.lowest, *(name for name, difference in self.differences.items() if not difference.significant)}


def make_standings(
    comparison: Comparison, records: Records, protocol: TableProtocol = "windows"
) -> dict[int, Standing]:
    """Test at every measured length which encodings differ from the lowest."""
    standings = {
        length: standing(
            {name: measured_rows(comparison, records, name, length, protocol) for name in comparison.encodings}
        )
        for length in comparison.lengths
    }
    return {length: at_length for length, at_length in standings.items() if at_length is not None}


def standing(rows: Mapping[str, Mapping[int, Row]], seed: int = 0) -> Standing | None:
    """Compare the encodings at one length, by their rows of each seed of training; None if there are no rows."""
    known = {encoding: seeds for encoding, seeds in rows.items() if seeds}
    if not known:
        return None
    means = {name: statistics.fmean(row["perplexity"] for row in seeds.values()) for name, seeds in known.items()}
    lowest = min(means, key=lambda encoding: means[encoding])
    common = {name: sorted(seeds.keys() & known[lowest].keys()) for name, seeds in known.items() if name != lowest}
    units = [row["units"] for seeds in known.values() for row in seeds.values()]
    if not common:
        return Standing(lowest, {}, "only one encoding has a number")
    if any(other[key] != units[0][key] for other in units for key in ("number", "tokens")):
        return Standing(lowest, {}, "the trials did not score the same tokens")
    if not all(common.values()):
        return Standing(lowest, {}, "no seed is finished for all encodings")
    differences = _differences(known, lowest, common, seed)
    reason, count = None, len(units[0]["number"])
    if count < FEW:
        reason = f"{count} documents or blocks are too few for a test (at least {FEW})"
    elif min(len(seeds) for seeds in common.values()) < 2:
        reason = "with one seed the variation between seeds is not known (at least two are needed)"
    elif not any(difference.significant for difference in differences.values()):
        reason = "no encoding differs significantly from the lowest"
    return Standing(lowest, differences, reason)


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
        of_seeds = differences.sum(1) / tokens.sum()  # (seeds,)
        drawn = sums[:, column] / counts
        if len(of_seeds) > 1:
            deviation = of_seeds.std(ddof=1) / len(of_seeds) ** 0.5
            drawn = drawn + deviation * generator.standard_t(len(of_seeds) - 1, size=DRAWS)
        results[encoding] = Difference(float(of_seeds.mean()), *interval(drawn, level))
    return results


@dataclass(frozen=True)
class Rank:
    """The rank of an encoding at a length, 1 for the lowest loss, and its 95 % interval."""

    mean: float  # over the resamples
    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.mean:.1f} ({self.low}–{self.high})" if self.high > self.low else str(self.low)


def ranks(rows: Mapping[str, Mapping[int, Row]], seed: int = 0) -> dict[str, Rank]:
    """The ranks of encodings at one length, by their rows of each seed; empty if they cannot be ranked.

    The losses of all encodings are computed for the same resamples of the documents. To each a value of Student's t is
    added, scaled by the standard error over seeds of the encoding's distance from the mean of all encodings.
    """
    known = {encoding: seeds for encoding, seeds in rows.items() if seeds}
    common = sorted(set.intersection(*(set(seeds) for seeds in known.values()))) if known else []
    units = [known[encoding][number]["units"] for encoding in known for number in common]
    if len(known) < 2 or len(common) < 2 or len(units[0]["number"]) < FEW:
        return {}
    if any(other[key] != units[0][key] for other in units for key in ("number", "tokens")):
        return {}
    tokens = np.array(units[0]["tokens"], dtype=np.float64)  # (units,)
    losses = np.array([[_losses(seeds[n]) for n in common] for seeds in known.values()])  # (encodings, seeds, units)
    sums, counts = bootstrap(losses.mean(1).T, tokens, seed=seed, draws=DRAWS)
    distances = losses.sum(2) / tokens.sum()
    distances = distances - distances.mean(0)  # (encodings, seeds)
    errors = distances.std(axis=1, ddof=1) / len(common) ** 0.5
    noise = np.random.default_rng(seed).standard_t(len(common) - 1, size=(DRAWS, len(known)))
    drawn = sums / counts[:, None] + errors * noise
    places = drawn.argsort(axis=1).argsort(axis=1) + 1  # (draws, encodings)
    return {
        encoding: Rank(
            float(column.mean()), *(int(bound) for bound in np.quantile(column, (0.025, 0.975), method="nearest"))
        )
        for encoding, column in zip(known, places.T, strict=True)
    }


def make_ranks(comparison: Comparison, records: Records) -> dict[int, dict[str, Rank]]:
    """The ranks at every length at which the encodings can be ranked."""
    by_length = {
        length: ranks({name: measured_rows(comparison, records, name, length) for name in comparison.encodings})
        for length in comparison.lengths
    }
    return {length: at_length for length, at_length in by_length.items() if at_length}


def _losses(row: Row) -> NDArray[np.float64]:
    return np.array(row["units"]["loss"], dtype=np.float64)


# -- Sentences


def marking(standings: Mapping[int, Standing]) -> list[str]:
    """Sentences that explain what is bold in the table, and why nothing is bold at some lengths."""
    sentences = []
    if any(at_length.unmarked is None for at_length in standings.values()):
        sentences.append(
            "Bold: the lowest mean of a length, and every encoding that does not differ from it significantly in a "
            "paired test of the losses on the same documents (bootstrap over documents, Student's t over seeds; "
            f"{LEVEL * 100:.0f} % for all comparisons at a length together)."
        )
    for reason in dict.fromkeys(at_length.unmarked for at_length in standings.values() if at_length.unmarked):
        lengths = [str(length) for length, at_length in standings.items() if at_length.unmarked == reason]
        sentences.append(f"Nothing is bold at {', '.join(lengths)}: {reason}.")
    return sentences


def cautions(comparison: Comparison, records: Records) -> list[str]:
    """Sentences on what a comparison of this size cannot show."""
    sentences = []
    tokens = [record["training"]["tokens"] for record in records.values() if "training" in record]
    if tokens and statistics.fmean(tokens) < ENOUGH:
        sentences.append(
            f"Each model was trained on {statistics.fmean(tokens):,.0f} tokens only, and has hardly learned to use "
            "positions. The table shows that an encoding trains, what it costs, and whether it fails at once at longer "
            f"lengths. It does not show which encoding is better: for that, train on {ENOUGH:,} tokens or more."
        )
    if comparison.seeds < SEVERAL:
        sentences.append(
            f"{comparison.seeds} seed{'' if comparison.seeds == 1 else 's'}: other seeds may give another order. Give "
            f"`--seeds {SEVERAL}` or more."
        )
    return sentences


def notes(comparison: Comparison, records: Records) -> list[str]:
    """Sentences on what the table does not show: trials that failed or are not finished, warnings, refused lengths."""
    sentences = [
        f"`{trial.name}` failed: {record['error']}" for trial, record in records.items() if record.get("error")
    ]
    warnings = {trial: record.get("training", {}).get("warning") for trial, record in records.items()}
    sentences += [f"`{trial.name}`: {warning}" for trial, warning in warnings.items() if warning]
    for encoding in comparison.encodings:
        rows = [row for trial in comparison.trials_of(encoding) for row in rows_of(records[trial], comparison)]
        refused = {row["length"]: row["error"] for row in rows if row["error"]}
        if refused:  # the reasons differ in their numbers only, so the first one is enough
            lengths = sorted(refused)
            sentences.append(f"`{encoding}` refused at {', '.join(map(str, lengths))}: {refused[lengths[0]]}")
    unfinished = [
        f"`{trial.name}`"
        for trial, record in records.items()
        if not record.get("error") and not finished(record, comparison, trial)
    ]
    return [*sentences, f"Not finished yet: {', '.join(unfinished)}."] if unfinished else sentences


def findings(comparison: Comparison, table: Perplexities, standings: Mapping[int, Standing]) -> list[str]:
    """Sentences on what the table shows: at the trained length, and how each encoding changes at other lengths."""
    trained, metric = comparison.length, comparison.family.metric
    at_home = {encoding: row[trained].mean for encoding, row in table.items()}
    known = {encoding: mean for encoding, mean in at_home.items() if mean is not None}
    sentences = []
    if len(known) > 1:
        lowest, highest = min(known, key=lambda name: known[name]), max(known, key=lambda name: known[name])
        sentences.append(
            f"At the trained length ({trained}) the means lie between {format_number(known[lowest])} (`{lowest}`) and "
            f"{format_number(known[highest])} (`{highest}`, {change(known[highest] / known[lowest])})"
        )
        if trained in standings and standings[trained].unmarked is None:
            together = [f"`{name}`" for name in comparison.encodings if name in standings[trained].marked - {lowest}]
            sentences[0] += f"; not significantly different from `{lowest}`: {', '.join(together) or 'none'}"
    for encoding, home in known.items():
        means = {length: cell.mean for length, cell in table[encoding].items() if length != trained}
        beyond = [
            f"{change(mean / home)} at {length / trained:.3g} ×" for length, mean in means.items() if mean is not None
        ]
        if beyond:
            sentences.append(f"`{encoding}` against its own {metric} at the trained length: {', '.join(beyond)}")
    return [f"{sentence}." for sentence in sentences]


def change(ratio: float) -> str:
    """Format a ratio as a change: "+5.0 %", "−12 %", or "25-fold" from 10 on."""
    if ratio >= 10:
        return f"{ratio:,.0f}-fold"
    size = f"{abs(ratio - 1) * 100:.{0 if abs(ratio - 1) >= 0.0995 else 1}f} %"
    return f"{'±' if size == '0.0 %' else '+' if ratio > 1 else '−'}{size}"


def format_number(number: float, scale: float | None = None) -> str:
    """Format a number with fewer decimals the larger it is, or `scale`: a deviation has the decimals of its mean."""
    size = abs(number if scale is None else scale)
    decimals = 2 if size < 100 else 1 if size < 1000 else 0
    return f"{number:,.{decimals}f}" if size < 1e7 else f"{number:.2e}"


# -- Costs


def costs(comparison: Comparison, records: Records) -> tuple[list[str], list[list[str]]]:
    """Size, speed and memory of each encoding, means over its seeds: the head of a table, and its rows."""
    longest = comparison.lengths[-1]
    head = ["encoding", "parameters", "steps", "tokens", "training tokens/s", "training seconds", "training memory"]
    head += [f"evaluating tokens/s at {comparison.length}", f"at {longest}", f"memory at {longest}"]
    rows = []
    for encoding in comparison.encodings:
        of_encoding = [records[trial] for trial in comparison.trials_of(encoding)]
        trained = [record["training"] for record in of_encoding if "training" in record]
        measured = [row for record in of_encoding for row in rows_of(record, comparison)]
        home, far = ([row for row in measured if row["length"] == at] for at in (comparison.length, longest))
        rows.append(
            [
                f"`{encoding}`",
                _mean([record["about"]["parameters"] for record in of_encoding if "about" in record]),
                _mean([result["step"] for result in trained]),
                _mean([result["tokens"] for result in trained]),
                _mean([result["tokens_per_second"] for result in trained]),
                _mean([result["seconds"] for result in trained]),
                _mean([result["peak_memory_bytes"] for result in trained], mebibytes),
                _mean([row["tokens_per_second"] for row in home]),
                _mean([row["tokens_per_second"] for row in far]),
                _mean([row["peak_memory_bytes"] for row in far], mebibytes),
            ]
        )
    return head, rows


def _mean(numbers: Sequence[float | None], form: Callable[[float], str] = "{:,.0f}".format) -> str:
    known = [number for number in numbers if number is not None]
    return form(statistics.fmean(known)) if known else "–"


def mebibytes(number: float) -> str:
    """A number of bytes as text."""
    return f"{number / 2**20:,.0f} MiB"
