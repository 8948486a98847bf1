"""`relpos.compare`: run the trials of a comparison, on this machine or on a cluster, and write its report."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from relpos.comparison.comparison import FILE, Trial, load_comparison, make_comparison
from relpos.comparison.options import CompareOptions
from relpos.comparison.report import write_report
from relpos.comparison.trial import DONE, FAILED, HELD, LOCK, LOG, TrialRecord, finished, read_record, write_record
from relpos.runs.settings import settings_by_key
from relpos.system.executors.interface import Executor, Part
from relpos.system.executors.local import LocalExecutor
from relpos.system.lock import HeldError, Lock, lock_holder
from relpos.system.options import takes
from relpos.system.processes import Exit
from relpos.system.progress import clock_time
from relpos.system.scheduler import active_words, run_parts

EVERY = 60.0  # seconds between two lines of progress outside a terminal
RETRY = 5.0  # seconds until a trial that another process holds is tried again
DRIVER = ".driver.lock"  # held by the process that hands the trials to a cluster
IN_USE = "the trials of {folder} are handed to a cluster by {holder}: wait for it or stop it."


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


def run_trials(
    out: Path,
    workers: int = 1,
    say: Callable[[str], None] = print,
    after: Callable[[], object] | None = None,
    executor: Executor | None = None,
) -> dict[Trial, str]:
    """Run every trial of a comparison that is not finished.

    A trial that failed in an earlier call is tried again; one that fails in this call is not. A trial that another
    process runs is left to that process, and this call returns when it has ended.

    Args:
        out: The comparison's folder (`make_comparison`).
        workers: How many trials run at the same time; the CPU's cores are divided among them.
        say: Receives a line when a trial ends.
        after: Called after every trial.
        executor: Where the trials run. Default: `workers` processes of this machine.

    Returns:
        The trials that failed, each with a sentence that says why.

    Raises:
        FileNotFoundError: The folder holds no comparison.
        ValueError: `workers` is less than 1, or another process hands the trials of the folder to a cluster.

    Example:
        >>> make_comparison(Path("runs/comparison"), ["alibi", "rope"], seeds=2)
        >>> failed = run_trials(Path("runs/comparison"), workers=2)
    """
    trials = Trials(out, LocalExecutor(workers) if executor is None else executor, say, after)
    with (
        Lock(out, DRIVER, in_use=IN_USE) if trials.executor.exclusive else contextlib.nullcontext(),
        contextlib.closing(run_parts(trials, trials.executor, EVERY)) as ends,
    ):
        for name, end in ends:
            trials.end(name, end)
    if after is not None:
        after()
    return trials.failed()


class Trials:
    """The trials of a comparison as parts: which are left, which other processes hold, how each ended.

    Args:
        out: The comparison's folder.
        executor: Where the trials run.
        say: Receives a line when a trial ends.
        after: Called after every trial.
    """

    def __init__(
        self, out: Path, executor: Executor, say: Callable[[str], object], after: Callable[[], object] | None
    ) -> None:
        self.out, self.executor, self.after = out, executor, after
        self._say = say
        self.comparison = load_comparison(out)
        # A trial has failed in this call only if it has been tried more often than when the call began.
        self.attempts = {trial: int(self._record(trial).get("attempts", 0)) for trial in self.comparison.trials()}
        self.held: dict[Trial, float] = {}  # trials of other processes, and when to try them again
        self.over: dict[Trial, TrialRecord] = {}  # trials that are finished or have failed, and their records
        self.news = False  # whether a trial has ended since the report was written

    def ready(self) -> dict[str, Part]:
        """The trials that are left, without those that other processes hold."""
        self.comparison = load_comparison(self.out)  # another process may have added encodings or seeds
        left = self._left()
        if self.news and self.after is not None:
            self.news = False
            self.after()
        now = time.monotonic()
        return {trial.name: self._part(trial) for trial in left if self.held.get(trial, 0.0) <= now}

    def waits(self) -> bool:
        return bool(self._left())

    def say(self, message: str) -> object:
        return self._say(message)

    def failed(self) -> dict[Trial, str]:
        """The trials that have failed, each with a sentence that says why."""
        errors = {trial: self._record(trial).get("error") for trial in self.comparison.trials()}
        return {trial: error for trial, error in errors.items() if error is not None}

    def _record(self, trial: Trial) -> TrialRecord:
        return read_record(self.out, trial)

    def _left(self) -> list[Trial]:
        """The trials that are not finished and have not failed in this call; running ones are among them."""
        running = self.executor.running
        for trial in self.comparison.trials():
            if trial in self.over or trial.name in running:
                continue
            record = self._record(trial)
            tried = int(record.get("attempts", 0)) > self.attempts.get(trial, 0)
            if finished(record, self.comparison, trial) or (tried and record["error"] is not None):
                self.over[trial] = record
                self.news = self.news or self.held.pop(trial, None) is not None
        return [trial for trial in self.comparison.trials() if trial not in self.over]

    def _part(self, trial: Trial) -> Part:
        folder, threads = self.out / trial.name, str(self.executor.threads)
        arguments = (self.out, trial.encoding, str(trial.seed), threads)
        return Part(
            "relpos.comparison.trial", arguments, folder, folder / LOG, reads=(self.out / FILE,), distributed=True
        )

    def end(self, name: str, end: Exit) -> None:
        """Record that a trial has ended."""
        trial = next(trial for trial in self.comparison.trials() if trial.name == name)
        code = end.code if end.code in (DONE, FAILED, HELD) else self._record_crash(trial, end)
        if code == HELD:
            if trial not in self.held:
                self.say(f"{trial.name} is held by {self._holder(trial)}")
            self.held[trial] = time.monotonic() + RETRY
            return
        self.news = True
        self.over[trial] = self._record(trial)
        self.held.pop(trial, None)
        error, duration = self.over[trial].get("error"), clock_time(end.seconds)
        result = f"done in {duration}" if error is None else f"failed after {duration}: {error}"
        self.say(f"{trial.name} {result}   ({self._count()})")

    def _record_crash(self, trial: Trial, end: Exit) -> int:
        """Record the failure of a trial whose process could not do so itself, unless another process has taken it."""
        reason = end.reason(f"see {trial.name}/{LOG}.")
        try:
            with Lock(self.out / trial.name, LOCK):
                record = self._record(trial)
                if int(record.get("attempts", 0)) > self.attempts.get(trial, 0) and record["error"] is not None:
                    return FAILED  # torchrun does not pass on the exit code of its processes
                attempts = max(int(record.get("attempts", 0)), self.attempts.get(trial, 0) + 1)
                name: TrialRecord = {"encoding": trial.encoding, "seed": trial.seed}
                write_record(self.out, trial, {**record, **name, "error": reason, "attempts": attempts})
        except HeldError:
            return HELD
        return FAILED

    def _holder(self, trial: Trial) -> str:
        return lock_holder(self.out / trial.name, LOCK)

    def _count(self) -> str:
        failed = sum(record.get("error") is not None for record in self.over.values())
        return f"{len(self.over)} of {len(self.comparison.trials())} trials" + (f", {failed} failed" if failed else "")

    def progress(self) -> str:
        logs = {trial.name: self.out / trial.name / LOG for trial in self.comparison.trials()}
        words = [self._count(), *active_words(self.executor, logs)]
        if not self.executor.running and self.held:
            words.append("waiting for " + ", ".join(f"{trial.name} ({self._holder(trial)})" for trial in self.held))
        left = self._seconds_left()
        return "  |  ".join([*words, f"about {clock_time(left)} left"] if left is not None else words)

    def _seconds_left(self) -> float | None:
        """An estimate from the mean duration of the finished trials."""
        durations = [float(record["seconds"]) for record in self.over.values() if record.get("error") is None]
        if not durations:
            return None
        mean, active = sum(durations) / len(durations), self.executor.active
        waiting = len(self.comparison.trials()) - len(self.over) - len(active)
        rest = sum(max(mean - self.executor.seconds(name), 0.0) for name in active)
        return (mean * waiting + rest) / (self.executor.places or max(1, len(active)))
