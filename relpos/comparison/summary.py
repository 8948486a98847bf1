"""The numbers of a comparison: means over seeds, tests at each length, costs, and sentences that say what they show."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from relpos.comparison.comparison import Comparison, Trial
from relpos.comparison.paired_test import LEVEL, Standing, standing
from relpos.comparison.trial import TrialRecord, finished, read_record
from relpos.pictures.blocks import Table
from relpos.runs.results import Row

Records = Mapping[Trial, TrialRecord]
Perplexities = dict[str, dict[int, "Cell"]]  # by encoding and length
Standings = dict[int, Standing]  # by length


@dataclass(frozen=True)
class Cell:
    """The perplexities of one encoding at one length.

    Attributes:
        values: One perplexity per seed.
        missing: What to print if there are no values: "refused", "failed", or "–" for not measured yet.
    """

    values: tuple[float, ...]
    missing: str

    @property
    def mean(self) -> float | None:
        """The mean over the seeds."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation over the seeds; None with fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def __str__(self) -> str:
        if self.mean is None:
            return self.missing
        return format_number(self.mean) + (
            "" if self.deviation is None else f" ± {format_number(self.deviation, self.mean)}"
        )


def read_records(comparison: Comparison, out: Path) -> dict[Trial, TrialRecord]:
    """Read the records of all trials (`relpos.comparison.trial.read_record`)."""
    return {trial: read_record(out, trial) for trial in comparison.trials()}


def make_table(comparison: Comparison, records: Records) -> Perplexities:
    """Collect the perplexities of a comparison.

    Args:
        comparison: The comparison.
        records: The records of its trials, from `read_records`.

    Returns:
        One cell per encoding and length: `table["alibi"][512].mean`.
    """
    return {
        encoding: {length: _cell(comparison, records, encoding, length) for length in comparison.lengths}
        for encoding in comparison.encodings
    }


def _cell(comparison: Comparison, records: Records, encoding: str, length: int) -> Cell:
    of_encoding = [records[Trial(encoding, seed)] for seed in range(comparison.seeds)]
    rows = [row for record in of_encoding for row in rows_of(record, comparison) if row["length"] == length]
    if any(row["error"] for row in rows):
        missing = "refused"
    else:
        missing = "failed" if any(record.get("error") for record in of_encoding) else "–"
    return Cell(tuple(float(row["perplexity"]) for row in rows if not row["error"]), missing)


def make_bits(comparison: Comparison, records: Records) -> dict[str, list[str]]:
    """Format bits per byte: for each encoding one text per length. Empty if no evaluation has counted bytes."""
    texts = {
        encoding: [_bits(measured_rows(comparison, records, encoding, length)) for length in comparison.lengths]
        for encoding in comparison.encodings
    }
    return texts if any(text != "–" for row in texts.values() for text in row) else {}


def _bits(rows: Mapping[int, Row]) -> str:
    values = [float(row["bits_per_byte"]) for row in rows.values() if row["bits_per_byte"] is not None]
    if not values:  # the tokenizer is not byte-level
        return "–"
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{deviation}"


def measured_rows(comparison: Comparison, records: Records, encoding: str, length: int) -> dict[int, Row]:
    """The evaluation rows of an encoding at a length that have a perplexity, by seed."""
    return {
        seed: row
        for seed in range(comparison.seeds)
        for row in rows_of(records[Trial(encoding, seed)], comparison)
        if row["length"] == length and not row["error"]
    }


def make_standings(comparison: Comparison, records: Records) -> Standings:
    """Test at every measured length which encodings differ from the lowest."""
    standings = {}
    for length in comparison.lengths:
        rows = {encoding: measured_rows(comparison, records, encoding, length) for encoding in comparison.encodings}
        at_length = standing(rows)
        if at_length is not None:
            standings[length] = at_length
    return standings


def marking(standings: Standings) -> list[str]:
    """Sentences that explain what is bold in the table, and why nothing is bold at some lengths."""
    sentences = []
    if any(at_length.unmarked is None for at_length in standings.values()):
        sentences.append(
            "Bold: the lowest mean of a length, and every encoding that does not differ from it significantly in a "
            "paired test of the losses on the same documents (bootstrap over documents, Student's t over seeds; "
            f"{LEVEL * 100:.0f} % for all comparisons at a length together)."
        )
    reasons: dict[str, list[int]] = {}
    for length, at_length in standings.items():
        if at_length.unmarked is not None:
            reasons.setdefault(at_length.unmarked, []).append(length)
    for reason, lengths in reasons.items():
        sentences.append(f"Nothing is bold at {', '.join(map(str, lengths))}: {reason}.")
    return sentences


def rows_of(record: TrialRecord, comparison: Comparison) -> list[Row]:
    """The rows of a trial's `windows` evaluation.

    Empty unless all lengths are measured: the longest length decides which tokens are scored.
    """
    rows = list(record["windows"]["rows"]) if "windows" in record else []
    return rows if {row["length"] for row in rows} >= set(comparison.lengths) else []


def notes(comparison: Comparison, records: Records) -> list[str]:
    """Sentences on what the table does not show: trials that failed or are not finished, warnings, refused lengths."""
    sentences = [
        f"`{trial.name}` failed: {record['error']}" for trial, record in records.items() if record.get("error")
    ]
    warnings = {trial: record.get("training", {}).get("warning") for trial, record in records.items()}
    sentences += [f"`{trial.name}`: {warning}" for trial, warning in warnings.items() if warning]
    for encoding in comparison.encodings:
        rows = [row for seed in range(comparison.seeds) for row in rows_of(records[Trial(encoding, seed)], comparison)]
        refused = {row["length"]: row["error"] for row in rows if row["error"]}
        if refused:  # the reasons differ in their numbers only, so the first one is enough
            lengths = sorted(refused)
            sentences.append(f"`{encoding}` refused at {', '.join(map(str, lengths))}: {refused[lengths[0]]}")
    unfinished = [
        trial
        for trial, record in records.items()
        if not record.get("error") and not finished(record, comparison, trial)
    ]
    if unfinished:
        sentences.append(f"Not finished yet: {', '.join(f'`{trial.name}`' for trial in unfinished)}.")
    return sentences


def findings(comparison: Comparison, table: Perplexities, standings: Standings) -> list[str]:
    """Sentences on what the table shows: at the trained length, and how each encoding changes at other lengths."""
    trained, metric = comparison.length, comparison.family.metric
    at_home = {encoding: row[trained].mean for encoding, row in table.items()}
    known = {encoding: mean for encoding, mean in at_home.items() if mean is not None}
    if not known:
        return []
    lowest, highest = min(known, key=lambda name: known[name]), max(known, key=lambda name: known[name])
    sentences = []
    if len(known) > 1:
        sentences.append(
            f"At the trained length ({trained}) the means lie between {format_number(known[lowest])} (`{lowest}`) and "
            f"{format_number(known[highest])} (`{highest}`, {change(known[highest] / known[lowest])})"
        )
        if trained in standings and standings[trained].unmarked is None:
            together = [f"`{name}`" for name in comparison.encodings if name in standings[trained].marked - {lowest}]
            sentences[0] += f"; not significantly different from `{lowest}`: {', '.join(together) or 'none'}"
    for encoding, home in known.items():
        others = {length: cell.mean for length, cell in table[encoding].items() if length != trained}
        beyond = [
            f"{change(mean / home)} at {multiple(length, trained)} ×"
            for length, mean in others.items()
            if mean is not None
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


def multiple(length: int, trained: int) -> str:
    """Format a length as a multiple of the trained length."""
    return f"{length / trained:.3g}"


def format_number(number: float, scale: float | None = None) -> str:
    """Format a number with fewer decimals the larger it is.

    Args:
        number: The number.
        scale: A number whose size decides the decimals instead, so that a deviation has those of its mean.
    """
    size = abs(number if scale is None else scale)
    decimals = 2 if size < 100 else 1 if size < 1000 else 0
    return f"{number:,.{decimals}f}" if size < 1e7 else f"{number:.2e}"


def several(number: int, thing: str) -> str:
    """Format a count: several(1, "seed") is "1 seed", several(3, "seed") is "3 seeds"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def cost_text(records: Records) -> str:
    """What the numbers of the table are."""
    threads = sorted({record["machine"]["threads"] for record in records.values() if "machine" in record})
    differ = " They differ between trials: speeds are not comparable." if len(threads) > 1 else ""
    return (
        "Means over the seeds. Training: the median speed over the run, the seconds with its evaluations and "
        "checkpoints, the peak memory of the process. "
        f"Threads per trial: {', '.join(map(str, threads)) or '–'}.{differ}"
    )


def costs(comparison: Comparison, records: Records) -> Table:
    """Size, speed and memory of each encoding: means over its seeds."""
    longest = comparison.lengths[-1]
    head = ["encoding", "parameters", "steps", "tokens", "training tokens/s", "training seconds", "training memory"]
    head += [f"evaluating tokens/s at {comparison.length}", f"at {longest}", f"memory at {longest}"]
    rows = []
    for encoding in comparison.encodings:
        of_encoding = [records[Trial(encoding, seed)] for seed in range(comparison.seeds)]
        trained = [record["training"] for record in of_encoding if "training" in record]
        sizes = [record["about"]["parameters"] for record in of_encoding if "about" in record]
        home, far = (
            [row for record in of_encoding for row in rows_of(record, comparison) if row["length"] == length]
            for length in (comparison.length, longest)
        )
        rows.append(
            [
                f"`{encoding}`",
                _mean(sizes, "{:,.0f}".format),
                _mean([result["step"] for result in trained], "{:,.0f}".format),
                _mean([result["tokens"] for result in trained], "{:,.0f}".format),
                _mean([result["tokens_per_second"] for result in trained], "{:,.0f}".format),
                _mean([result["seconds"] for result in trained], "{:,.0f}".format),
                _mean([result["peak_memory_bytes"] for result in trained], mebibytes),
                _mean([row["tokens_per_second"] for row in home], "{:,.0f}".format),
                _mean([row["tokens_per_second"] for row in far], "{:,.0f}".format),
                _mean([row["peak_memory_bytes"] for row in far], mebibytes),
            ]
        )
    return Table(head, rows)


def _mean(numbers: Sequence[float | None], form: Callable[[float], str]) -> str:
    known = [number for number in numbers if number is not None]
    return form(statistics.fmean(known)) if known else "–"


def mebibytes(number: float) -> str:
    """A number of bytes as text."""
    return f"{number / 2**20:,.0f} MiB"
