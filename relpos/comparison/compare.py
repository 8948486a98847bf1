"""Compare encodings: `relpos.compare`, which is also what the command `relpos compare` calls."""

from dataclasses import dataclass
from pathlib import Path

from relpos.comparison.comparison import Trial, make_comparison
from relpos.comparison.execution import compare as run_trials
from relpos.comparison.options import CompareOptions
from relpos.comparison.report import write_report
from relpos.runs.settings import settings_by_key
from relpos.system.options import takes


@dataclass(frozen=True)
class ComparisonReport:
    """Where the report of a comparison is, and what is missing in it.

    Attributes:
        html: The report as one HTML file.
        markdown: The same as Markdown.
        failed: The trials that failed, each with the reason.
    """

    html: Path
    markdown: Path
    failed: dict[Trial, str]


@takes(CompareOptions)
def compare(options: CompareOptions) -> ComparisonReport:
    """Train and evaluate several encodings under equal conditions, and write one report.

    If interrupted, call it again to resume: finished trials are kept, and failed trials are run once more. Several
    processes, or machines that share the folder, may call it at the same time and divide the trials among them. Later
    calls may add encodings, seeds and lengths; arguments that are None keep the value stored in the folder.

    Returns:
        The paths of the report, and the trials that failed.

    Raises:
        ValueError: An encoding or a setting is not allowed, or the folder holds a comparison with other settings.
        OSError: The data cannot be read, or the folder cannot be written.

    Example:
        >>> report = relpos.compare(["alibi", "rope", "cable"], seeds=3, steps=1200, out="runs/three")
        >>> report.html, report.failed
    """
    folder, say = Path(options.out), options.say
    failed: dict[Trial, str] = {}
    if not options.report_only:
        comparison = make_comparison(
            folder,
            options.encodings,
            options.seeds,
            options.lengths,
            options.positions,
            options.eval_tokens,
            {**settings_by_key(options), **(options.overrides or {})},
            options.command,
        )
        size = f"{len(comparison.encodings)} encodings, {comparison.seeds} seeds of each"
        say(f"{folder}: {len(comparison.trials())} trials ({size})")
        failed = run_trials(folder, options.workers, say, lambda: write_report(folder), options.executor)
    html, markdown = write_report(folder)
    return ComparisonReport(html, markdown, failed)
