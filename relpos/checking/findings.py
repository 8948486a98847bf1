"""What a check found: one finding per test, and the report as a table, JSON and a self-contained page."""

import dataclasses
import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from relpos.pictures.markdown import escaped, items, table, to_html

Status = Literal["passed", "failed", "not tested"]
PASSED: Status = "passed"
FAILED: Status = "failed"
NOT_TESTED: Status = "not tested"
SIGNS = {PASSED: "✓", FAILED: "✗", NOT_TESTED: "–"}
STYLE = """
h1, p { overflow-wrap: anywhere; }
th { text-align: left; } td { vertical-align: top; } td:nth-child(n+3) { white-space: normal; min-width: 9em; }
@media (max-width: 700px) {  /* a phone: one test below the other */
  table, tbody, tr { display: block; } thead, td:nth-child(2) { display: none; }
  tr { border-bottom: 1px solid #eee; padding: .4em 0; }
  td { display: block; border: 0; padding: 0; white-space: normal; }
  td:nth-child(n+3) { padding-left: 1.2em; } td:empty { display: none; }
}
svg { max-width: 100%; height: auto; } svg text { fill: currentColor; font: 12px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) {
  body { color: #e4e4e4; background: #16181c; } h2 { border-color: #444; } tr, th, td { border-color: #333; }
  th { border-color: #888; } pre { background: #22252b; } a { color: #8ab4f8; }
}
"""
EXIT_STATUS = {True: 1, False: 0, None: 2}  # by `Report.failed`; None: nothing could be tested


@dataclass(frozen=True)
class Finding:
    """What one test found."""

    test: str  # its name, as `only` takes it
    title: str  # what was tested
    status: Status
    amount: float | None = None  # by how much it is off, relative to what is compared; the number of tokens for windows
    words: str = ""  # the amount in words; for a test that was not made, the reason
    begins: str = ""  # the first position, layer or distance at which it is wrong
    fault: str | None = None  # name of the kind of fault, where the pattern is known
    diagnosis: str = ""  # what that usually means
    remedy: str = ""  # the line that mends it
    differences: tuple[float, ...] = ()  # by position, for tests that compare outputs
    losses: tuple[tuple[str, float, float, float], ...] = ()  # variant, loss, difference and its standard error
    evidence: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # what faults are told by


class WrongPositionError(AssertionError):
    """The positions of a model are wrong."""


@dataclass(frozen=True)
class Report:
    """The findings of a check.

    Attributes:
        subject: What was checked.
        findings: One per test, the failed ones first.
        seconds: How long it took.
        positions: Where the configuration puts position, one line per group of equal layers; empty if there is none.
    """

    subject: str
    findings: Sequence[Finding]
    seconds: float = 0.0
    positions: Sequence[str] = ()

    @property
    def failed(self) -> bool:
        """Whether anything is wrong."""
        return any(finding.status == FAILED for finding in self.findings)

    @property
    def tested(self) -> bool:
        """Whether at least one test could be made."""
        return any(finding.status != NOT_TESTED for finding in self.findings)

    @property
    def exit_status(self) -> int:
        """0 right, 1 wrong, 2 could not be tested."""
        return EXIT_STATUS[self.failed if self.tested else None]

    @property
    def faults(self) -> list[str]:
        """The names of the faults that were recognised, the most telling first."""
        return list(dict.fromkeys(finding.fault for finding in self.findings if finding.fault))

    @property
    def summary(self) -> str:
        """One sentence."""
        counts = {status: sum(finding.status == status for finding in self.findings) for status in SIGNS}
        if not self.tested:
            return f"{self.subject}: nothing could be tested."
        verdict = f"{counts[FAILED]} of {counts[FAILED] + counts[PASSED]} tests failed" if self.failed else "right"
        untested = f"; {counts[NOT_TESTED]} could not be tested" if counts[NOT_TESTED] else ""
        tests = "" if self.failed else f" in {counts[PASSED]} {'test' if counts[PASSED] == 1 else 'tests'}"
        return f"{self.subject}: {verdict}{tests}{untested}."

    def assert_right(self) -> None:
        """Raise an error that names what is wrong, or that nothing could be tested.

        Example:
            >>> relpos.check(model).assert_right()
        """
        if self.failed:
            wrong = (finding for finding in self.findings if finding.status == FAILED)
            lines = [f"{f.title}: {f.words}{f' ({f.begins})' if f.begins else ''}. {f.diagnosis}" for f in wrong]
            raise WrongPositionError("\n".join([self.summary, *lines]))
        if not self.tested:
            reasons = [f"{finding.title}: {finding.words}" for finding in self.findings]
            raise WrongPositionError("\n".join([self.summary, *reasons]))

    def rows(self) -> list[list[str]]:
        """The table: what was tested, the result, by how much, where it begins, what it means, what mends it."""
        return [
            [f"{SIGNS[f.status]} {f.title}", f.status, f.words, f.begins, f.diagnosis, f.remedy] for f in self.findings
        ]

    def to_markdown(self) -> str:
        """The report as Markdown: what is wrong and what mends it, then every test, then what could not be tested."""
        folders = Path(self.subject).parts
        name = folders[-1] if len(folders) > 2 else self.subject  # a name on the hub has two parts
        lines = [f"# relpos check: {escaped(name)}", "", escaped(self.summary), ""]
        if self.positions:
            lines += ["As configured:", "", items([escaped(line) for line in self.positions]), ""]
        for finding in self.findings:
            if finding.status == FAILED:
                begins = f" ({finding.begins})" if finding.begins else ""
                words = f"{finding.words[:1].upper()}{finding.words[1:]}{begins}."
                name = f": {finding.fault}" if finding.fault else ""
                lines += [f"## {SIGNS[FAILED]} {escaped(finding.title + name)}", "", escaped(words), ""]
                lines += [f"**What it means.** {escaped(finding.diagnosis)}", ""]
                lines += [f"**What to do.** {escaped(finding.remedy)}", ""] if finding.remedy else []
        made = [
            row[:4] for row, finding in zip(self.rows(), self.findings, strict=True) if finding.status != NOT_TESTED
        ]
        columns = ["test", "result", "by how much", "begins"]
        columns = columns if any(row[3] for row in made) else columns[:3]
        cells = [[escaped(cell) for cell in row[: len(columns)]] for row in made]
        lines += ["## Tests", "", table(columns, cells, text=True), ""]
        reasons: dict[str, list[str]] = {}
        for finding in self.findings:
            if finding.status == NOT_TESTED:
                reasons.setdefault(finding.words, []).append(finding.title)
        if reasons:
            untested = [f"{escaped('; '.join(titles))}: {escaped(reason)}" for reason, titles in reasons.items()]
            lines += ["## Not tested", "", items(untested), ""]
        for finding in self.findings:
            if finding.losses:
                numbers = [[escaped(words), f"{a:.3f}", f"{b:+.3f} ± {c:.3f}"] for words, a, b, c in finding.losses]
                lines += ["## Loss of each variant", "", table(["variant", "loss", "difference"], numbers), ""]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The report for other programs."""
        findings = [dataclasses.asdict(dataclasses.replace(finding, evidence={})) for finding in self.findings]
        for finding in findings:
            del finding["evidence"]
        return {
            "subject": self.subject,
            "positions": list(self.positions),
            "failed": self.failed,
            "exit_status": self.exit_status,
            "faults": self.faults,
            "seconds": round(self.seconds, 1),
            "findings": findings,
        }

    def to_html(self) -> str:
        """The report as one page that needs no network, in the reader's light or dark colours."""
        page = to_html(self.to_markdown(), Path(), STYLE)
        curves = [curve(finding) for finding in self.findings if len(finding.differences) > 1]
        return page.replace("</body>", "\n".join([*curves, "</body>"]))

    def save(self, file: str | Path) -> Path:
        """Write the report to a .json, .md or .html file."""
        path = Path(file)
        writers = {
            ".json": lambda: json.dumps(self.to_json(), indent=1, ensure_ascii=False),
            ".md": self.to_markdown,
            ".html": self.to_html,
        }
        if path.suffix not in writers:
            raise ValueError(f"a report cannot be written to {path.name!r}: the name must end in {', '.join(writers)}.")
        path.write_text(writers[path.suffix](), encoding="utf-8")
        return path


def curve(finding: Finding) -> str:
    """The differences of a finding by position, as a picture: logarithmic, from 1e-7 to the largest."""
    width, height, left, bottom = 640, 160, 60, 24
    top = max(0.0, math.log10(max(*finding.differences, 1e-6)))

    def place(index: int, value: float) -> str:
        x = left + (width - left - 8) * index / (len(finding.differences) - 1)
        y = (height - bottom) * (top - max(-7.0, math.log10(max(value, 1e-7)))) / (top + 7.0) + 8
        return f"{x:.1f},{y:.1f}"

    points = " ".join(place(index, value) for index, value in enumerate(finding.differences))
    labels = [f'<text x="0" y="14">{10**top:.2g}</text>', f'<text x="0" y="{height - bottom + 8}">1e−7</text>']
    words = f"{len(finding.differences)} positions, in order; relative to the spread of the outputs, logarithmic"
    labels.append(f'<text x="{left}" y="{height - 2}">{words}</text>')
    line = f'<polyline fill="none" stroke="#d9534f" stroke-width="2" points="{points}"/>'
    size = f'viewBox="0 0 {width} {height + 8}" width="{width}" role="img"'
    return f"<h2>{html.escape(finding.title)}: difference by position</h2>\n<svg {size}>{line}{''.join(labels)}</svg>"
