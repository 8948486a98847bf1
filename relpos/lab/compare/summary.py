"""The numbers of a comparison: means over seeds, what is told apart at each length, and what is seen in plain words."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relpos.lab.compare.comparison import Comparison, Trial
from relpos.lab.compare.paired_test import LEVEL, Standing, standing
from relpos.lab.compare.trial import finished, read_record

Records = Mapping[Trial, dict[str, Any]]
Perplexities = dict[str, dict[int, "Cell"]]  # by encoding and length
Standings = dict[int, Standing]  # by length


@dataclass(frozen=True)
class Cell:
    """The perplexities of one encoding at one length, one per seed; or other numbers of its rows."""

    values: tuple[float, ...]
    missing: str  # why there is none: refused, failed, or not yet

    @property
    def mean(self) -> float | None:
        """Over the seeds."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation over the seeds, of at least two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def __str__(self) -> str:
        if self.mean is None:
            return self.missing
        return told(self.mean) + ("" if self.deviation is None else f" ± {told(self.deviation, self.mean)}")


def read_records(plan: Comparison, out: Path) -> dict[Trial, dict[str, Any]]:
    """What is known of every part."""
    return {part: read_record(out, part) for part in plan.parts()}


def make_table(plan: Comparison, records: Records) -> Perplexities:
    """A row an encoding, a column a length."""
    return {
        encoding: {length: _cell(plan, records, encoding, length) for length in plan.lengths}
        for encoding in plan.encodings
    }


def _cell(plan: Comparison, records: Records, encoding: str, length: int) -> Cell:
    found = [records[Trial(encoding, seed)] for seed in range(plan.seeds)]
    rows = [row for record in found for row in rows_of(record, plan) if row["length"] == length]
    if any(row["error"] for row in rows):
        missing = "refused"
    else:
        missing = "failed" if any(record.get("error") for record in found) else "–"
    return Cell(tuple(float(row["perplexity"]) for row in rows if not row["error"]), missing)


def make_bits(plan: Comparison, records: Records) -> dict[str, list[str]]:
    """Bits per byte by encoding, one text per length; empty where no evaluation counted bytes."""
    found = {
        encoding: [_bits(measured_rows(plan, records, encoding, length)) for length in plan.lengths]
        for encoding in plan.encodings
    }
    return found if any(text != "–" for texts in found.values() for text in texts) else {}


def _bits(rows: Mapping[int, dict[str, Any]]) -> str:
    values = [float(row["bits_per_byte"]) for row in rows.values() if row.get("bits_per_byte") is not None]
    if not values or len(values) < len(rows):  # older evaluations have none
        return "–"
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{deviation}"


def measured_rows(plan: Comparison, records: Records, encoding: str, length: int) -> dict[int, dict[str, Any]]:
    """An encoding's rows at a length that have a number, by seed."""
    return {
        seed: row
        for seed in range(plan.seeds)
        for row in rows_of(records[Trial(encoding, seed)], plan)
        if row["length"] == length and not row["error"]
    }


def make_standings(plan: Comparison, records: Records) -> Standings:
    """Which encodings are told apart from the lowest, at every length that has a number."""
    found = {}
    for length in plan.lengths:
        rows = {encoding: measured_rows(plan, records, encoding, length) for encoding in plan.encodings}
        at_length = standing(rows)
        if at_length is not None:
            found[length] = at_length
    return found


def marking(standings: Standings) -> list[str]:
    """What is bold in the table, and where nothing is."""
    found = []
    if any(at_length.unmarked is None for at_length in standings.values()):
        found.append(
            "Bold: the lowest mean of a length, and every encoding that is not told apart from it. Two are told apart "
            "if the difference of their losses on the same documents passes a paired test (bootstrap over documents, "
            f"Student's t over seeds; {LEVEL * 100:.0f} % for all comparisons at a length together)."
        )
    reasons: dict[str, list[int]] = {}
    for length, at_length in standings.items():
        if at_length.unmarked is not None:
            reasons.setdefault(at_length.unmarked, []).append(length)
    for reason, lengths in reasons.items():
        found.append(f"Nothing is bold at {', '.join(map(str, lengths))}: {reason}.")
    return found


def rows_of(record: dict[str, Any], plan: Comparison) -> list[dict[str, Any]]:
    """A part's rows of the protocol `windows`, if it has all lengths: which text is scored depends on the longest."""
    rows = list(record["windows"]["rows"]) if "windows" in record else []
    return rows if {row["length"] for row in rows} >= set(plan.lengths) else []


def notes(plan: Comparison, records: Records) -> list[str]:
    """What the table does not show: parts that failed, were hardly trained or are not finished, cells refused."""
    found = [f"`{part.name}` failed: {record['error']}" for part, record in records.items() if record.get("error")]
    warnings = {part: record.get("training", {}).get("warning") for part, record in records.items()}
    found += [f"`{part.name}`: {warning}" for part, warning in warnings.items() if warning]
    for encoding in plan.encodings:
        rows = [row for seed in range(plan.seeds) for row in rows_of(records[Trial(encoding, seed)], plan)]
        refused = {row["length"]: row["error"] for row in rows if row["error"]}
        if refused:  # the sentences differ in their numbers only: the first says it for all
            lengths = sorted(refused)
            found.append(f"`{encoding}` refused at {', '.join(map(str, lengths))}: {refused[lengths[0]]}")
    open_parts = [
        part for part, record in records.items() if not record.get("error") and not finished(record, plan, part)
    ]
    older = [part for part in open_parts if rows_of(records[part], plan)]
    missing = [part for part in open_parts if part not in older]
    if missing:
        found.append(f"Not finished yet: {_named(missing)}.")
    if older:
        found.append(
            f"Measured by an earlier version, without the losses of each document: {_named(older)}. Rerun the command "
            "to measure them again; nothing is trained again."
        )
    return found


def _named(parts: Sequence[Trial]) -> str:
    return ", ".join(f"`{part.name}`" for part in parts)


def findings(plan: Comparison, table: Perplexities, standings: Standings) -> list[str]:
    """What is seen, in words: at the trained length, and how each encoding changes beyond it."""
    trained = plan.length
    at_home = {encoding: row[trained].mean for encoding, row in table.items()}
    known = {encoding: mean for encoding, mean in at_home.items() if mean is not None}
    if not known:
        return []
    lowest, highest = min(known, key=lambda name: known[name]), max(known, key=lambda name: known[name])
    found = []
    if len(known) > 1:
        found.append(
            f"At the trained length ({trained}) the means lie between {told(known[lowest])} (`{lowest}`) and "
            f"{told(known[highest])} (`{highest}`, {change(known[highest] / known[lowest])})"
        )
        if trained in standings and standings[trained].unmarked is None:
            together = [f"`{name}`" for name in plan.encodings if name in standings[trained].marked - {lowest}]
            found[0] += f"; not told apart from `{lowest}`: {', '.join(together) or 'none'}"
    for encoding, home in known.items():
        others = {length: cell.mean for length, cell in table[encoding].items() if length != trained}
        beyond = [
            f"{change(mean / home)} at {multiple(length, trained)} ×"
            for length, mean in others.items()
            if mean is not None
        ]
        if beyond:
            found.append(f"`{encoding}` against its own perplexity at the trained length: {', '.join(beyond)}")
    return [f"{sentence}." for sentence in found]


def change(ratio: float) -> str:
    """A ratio as a change in per cent, or as so many times where that reads better."""
    if ratio >= 10:
        return f"{ratio:,.0f}-fold"
    size = f"{abs(ratio - 1) * 100:.{0 if abs(ratio - 1) >= 0.0995 else 1}f} %"
    return f"{'±' if size == '0.0 %' else '+' if ratio > 1 else '−'}{size}"


def multiple(length: int, trained: int) -> str:
    """A length as a multiple of the trained one."""
    return f"{length / trained:.3g}"


def told(number: float, beside: float | None = None) -> str:
    """A number with the decimals that its size deserves, or the size of the one it stands beside."""
    size = abs(number if beside is None else beside)
    decimals = 2 if size < 100 else 1 if size < 1000 else 0
    return f"{number:,.{decimals}f}" if size < 1e7 else f"{number:.2e}"


def several(number: int, thing: str) -> str:
    """One thing, or so many things."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
