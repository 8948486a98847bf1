"""The numbers of a comparison: means over seeds, the best of each length, and what is seen in plain words."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relpos.lab.part import finished, read_record
from relpos.lab.plan import Part, Plan

Records = Mapping[Part, dict[str, Any]]
Perplexities = dict[str, dict[int, "Cell"]]  # by encoding and length


@dataclass(frozen=True)
class Cell:
    """The perplexities of one encoding at one length, one a seed."""

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


def read_records(plan: Plan, out: Path) -> dict[Part, dict[str, Any]]:
    """What is known of every part."""
    return {part: read_record(out, part) for part in plan.parts()}


def make_table(plan: Plan, records: Records) -> Perplexities:
    """A row an encoding, a column a length."""
    return {
        encoding: {length: _cell(plan, records, encoding, length) for length in plan.lengths}
        for encoding in plan.encodings
    }


def _cell(plan: Plan, records: Records, encoding: str, length: int) -> Cell:
    found = [records[Part(encoding, seed)] for seed in range(plan.seeds)]
    rows = [row for record in found for row in rows_of(record, plan) if row["length"] == length]
    if any(row["error"] for row in rows):
        missing = "refused"
    else:
        missing = "failed" if any(record.get("error") for record in found) else "–"
    return Cell(tuple(float(row["perplexity"]) for row in rows if not row["error"]), missing)


def rows_of(record: dict[str, Any], plan: Plan) -> list[dict[str, Any]]:
    """A part's rows of the protocol `windows`, if it has all lengths: which text is scored depends on the longest."""
    rows = list(record["windows"]["rows"]) if "windows" in record else []
    return rows if {row["length"] for row in rows} >= set(plan.lengths) else []


def best(table: Perplexities, length: int) -> str | None:
    """The encoding with the lowest mean at a length."""
    means = {encoding: row[length].mean for encoding, row in table.items()}
    seen = {encoding: mean for encoding, mean in means.items() if mean is not None}
    return min(seen, key=lambda encoding: seen[encoding]) if seen else None


def notes(plan: Plan, records: Records) -> list[str]:
    """What the table does not show: parts that failed, were hardly trained or are not finished, cells refused."""
    found = [f"`{part.name}` failed: {record['error']}" for part, record in records.items() if record.get("error")]
    warnings = {part: record.get("training", {}).get("warning") for part, record in records.items()}
    found += [f"`{part.name}`: {warning}" for part, warning in warnings.items() if warning]
    for encoding in plan.encodings:
        rows = [row for seed in range(plan.seeds) for row in rows_of(records[Part(encoding, seed)], plan)]
        refused = {row["length"]: row["error"] for row in rows if row["error"]}
        if refused:  # the sentences differ in their numbers only: the first says it for all
            lengths = sorted(refused)
            found.append(f"`{encoding}` refused at {', '.join(map(str, lengths))}: {refused[lengths[0]]}")
    open_parts = [
        part.name for part, record in records.items() if not record.get("error") and not finished(record, plan, part)
    ]
    if open_parts:
        found.append(f"Not finished yet: {', '.join(f'`{name}`' for name in open_parts)}.")
    return found


def findings(plan: Plan, table: Perplexities) -> list[str]:
    """What is seen, in words: at the trained length, and how each encoding changes beyond it."""
    trained = plan.length
    at_home = {encoding: row[trained].mean for encoding, row in table.items()}
    known = {encoding: mean for encoding, mean in at_home.items() if mean is not None}
    if not known:
        return []
    lowest, highest = min(known, key=lambda name: known[name]), max(known, key=lambda name: known[name])
    found = [f"At the trained length ({trained}) `{lowest}` is lowest with {told(known[lowest])}"]
    if highest != lowest:
        found[0] += f"; `{highest}` is highest with {told(known[highest])}, {change(known[highest] / known[lowest])}"
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
