"""`relpos.compare`: run the trials of a comparison, on this machine or on a cluster, and write its report.

python -m relpos.comparison.compare FOLDER ENCODING SEED THREADS

trains and evaluates one trial. If its process crashes, or the system kills it because memory runs out, only this trial
fails. Slow imports come after the trial's lock is held. Started by torchrun, the first process does this and the others
help it to train.
"""

import contextlib
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from relpos.comparison.compare_options import (
    LENGTH,
    QUICK_ENCODINGS,
    QUICK_SEEDS,
    QUICK_STEPS,
    CompareOptions,
)
from relpos.comparison.comparison import (
    ENDS,
    FILE,
    Comparison,
    Machine,
    Trial,
    TrialRecord,
    finished,
    load_comparison,
    make_comparison,
    read_record,
    trained,
    write_record,
)
from relpos.comparison.duration import sentence, too_few_units
from relpos.comparison.search import choose_settings, make_search, search_folder
from relpos.evaluation.evaluate_options import QUICK_MULTIPLES, default_eval_tokens
from relpos.runs.checkpoints import read_log
from relpos.runs.results import RunResult, read_about
from relpos.runs.settings import settings_by_key
from relpos.system.executors import Executor, Exit, LocalExecutor, Part, Parts, end_with_parent, leave_group
from relpos.system.files import HeldError, Lock, lock_holder
from relpos.system.memory import begin_peak, memory_of_machine, peak
from relpos.system.options import takes
from relpos.system.progress import clock_time

EVERY = 60.0  # seconds between two lines of progress outside a terminal
RETRY = 5.0  # seconds until a trial that another process holds is tried again
DRIVER = ".driver.lock"  # held by the process that hands the trials to a cluster
IN_USE = "the trials of {folder} are handed to a cluster by {holder}: wait for it or stop it."
LOG, LOCK = "trial.log", ".trial.lock"  # in a trial's folder
GRACE = 30.0  # seconds until a process that helped to train ends after an error: the first one records the reason
DONE, FAILED, HELD = 0, 65, 75  # exit codes of a trial's process; any other (Python's own is 1) is a crash


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
    from relpos.comparison.report import write_report

    folder, say = Path(options.out), options.say
    failed: dict[Trial, str] = {}
    if not options.report_only:
        if options.quick:
            options = _quick(options)
        comparison = make_comparison(
            folder,
            options.encodings,
            options.seeds,
            options.lengths,
            options.positions,
            options.eval_tokens,
            {**settings_by_key(options), **(options.overrides or {})},
            options.command,
            options.search,
            options.last,
        )
        size = f"{len(comparison.encodings)} encodings, {comparison.seeds} seeds of each"
        say(f"{folder}: {len(comparison.trials())} trials ({size})")
        executor = options.executor or LocalExecutor(options.workers)
        if isinstance(executor, LocalExecutor):
            say(sentence(comparison, folder, executor))
        warning = too_few_units(comparison, folder)
        if warning is not None:
            say(warning)
        if comparison.search:
            failed = run_search(folder, options.workers, say, options.executor)
        failed |= run_trials(folder, options.workers, say, lambda: write_report(folder), options.executor)
    html, markdown = write_report(folder)
    return ComparisonReport(html, markdown, failed)


def _quick(options: CompareOptions) -> CompareOptions:
    """The options of a first look, where none are given."""
    overrides = options.overrides or {}
    ends = (options.steps, options.tokens, options.minutes, *(overrides.get(end) for end in ENDS))
    length = int(overrides.get("data.length", options.length or LENGTH))
    lengths = [length * multiple for multiple in QUICK_MULTIPLES]
    return replace(
        options,
        encodings=options.encodings or QUICK_ENCODINGS,
        seeds=options.seeds or QUICK_SEEDS,
        steps=options.steps if any(end is not None for end in ends) else QUICK_STEPS,
        lengths=options.lengths or lengths,
        positions=options.positions or lengths[1],
        eval_tokens=options.eval_tokens or default_eval_tokens("windows", None, quick=True),
    )


# -- All trials


def run_trials(
    out: Path,
    workers: int = 1,
    say: Callable[[str], object] = print,
    after: Callable[[], object] = lambda: None,
    executor: Executor | None = None,
) -> dict[Trial, str]:
    """Run every trial of a comparison that is not finished; returns those that failed, each with the reason.

    A trial that failed in an earlier call is tried again; one that fails in this call is not. A trial that another
    process runs is left to that process, and this call returns when it has ended. `after` is called after every trial.
    """
    trials = Trials(out, LocalExecutor(workers) if executor is None else executor, say, after)
    with (
        Lock(out, DRIVER, in_use=IN_USE) if trials.executor.exclusive else contextlib.nullcontext(),
        contextlib.closing(trials.run(EVERY)) as ends,
    ):
        for name, end in ends:
            trials.end(name, end)
    after()
    errors = {trial: read_record(out, trial).get("error") for trial in trials.comparison.trials()}
    return {trial: error for trial, error in errors.items() if error is not None}


def run_search(
    out: Path, workers: int = 1, say: Callable[[str], object] = print, executor: Executor | None = None
) -> dict[Trial, str]:
    """Run the search of a comparison and store the chosen settings; returns the trials that failed."""
    search = make_search(out)
    if search is None:
        return {}
    say(f"{search_folder(out)}: {len(search.trials())} trials of the search, scored on the validation split")
    failed = run_trials(search_folder(out), workers, say, executor=executor)
    choose_settings(out)
    return failed


class Trials(Parts):
    """The trials of a comparison as parts: which are left, which other processes hold, how each ended."""

    def __init__(
        self, out: Path, executor: Executor, say: Callable[[str], object], after: Callable[[], object]
    ) -> None:
        super().__init__(executor, {}, say)
        self.out, self.after = out, after
        self.comparison = load_comparison(out)
        # A trial has failed in this call only if it has been tried more often than when the call began.
        self.attempts = {trial: read_record(out, trial).get("attempts", 0) for trial in self.comparison.trials()}
        self.held: dict[Trial, float] = {}  # trials of other processes, and when to try them again
        self.over: dict[Trial, TrialRecord] = {}  # trials that are finished or have failed, and their records
        self.news = False  # whether a trial has ended since the report was written

    def ready(self) -> dict[str, Part]:
        """The trials that are left, without those that other processes hold."""
        self.comparison = load_comparison(self.out)  # another process may have added encodings or seeds
        left = self._left()
        if self.news:
            self.news = False
            self.after()
        now = time.monotonic()
        return {trial.name: self._part(trial) for trial in left if self.held.get(trial, 0.0) <= now}

    def waits(self) -> bool:
        return bool(self._left())

    def _left(self) -> list[Trial]:
        """The trials that are not finished and have not failed in this call; running ones are among them."""
        running = self.executor.running
        for trial in self._settled():
            if trial in self.over or trial.name in running:
                continue
            record = read_record(self.out, trial)
            if finished(record, self.comparison, trial) or self._failed_now(trial, record):
                self.over[trial] = record
                self.news = self.news or self.held.pop(trial, None) is not None
        return [trial for trial in self._settled() if trial not in self.over]

    def _settled(self) -> list[Trial]:
        """The trials whose settings are known; another process may be searching for those of an encoding it added."""
        return [trial for trial in self.comparison.trials() if self.comparison.settled(trial.encoding)]

    def _failed_now(self, trial: Trial, record: TrialRecord) -> bool:
        tried = record.get("attempts", 0) > self.attempts.get(trial, 0)
        return tried and record.get("error") is not None

    def _part(self, trial: Trial) -> Part:
        folder = self.out / trial.name
        arguments = (self.out, trial.encoding, str(trial.seed), str(self.executor.threads))
        reads = (self.out / FILE,)
        return Part("relpos.comparison.compare", arguments, folder, folder / LOG, reads, distributed=True)

    def end(self, name: str, end: Exit) -> None:
        trial = next(trial for trial in self.comparison.trials() if trial.name == name)
        code = end.code if end.code in (DONE, FAILED, HELD) else self._record_crash(trial, end)
        if code == HELD:
            if trial not in self.held:
                self.say(f"{trial.name} is held by {self._holder(trial)}")
            self.held[trial] = time.monotonic() + RETRY
            return
        self.news = True
        self.over[trial] = record = read_record(self.out, trial)
        self.held.pop(trial, None)
        error, duration = record.get("error"), clock_time(end.seconds)
        result = f"done in {duration}" if error is None else f"failed after {duration}: {error}"
        self.say(f"{trial.name} {result}   ({self._count()})")

    def _record_crash(self, trial: Trial, end: Exit) -> int:
        """Record the failure of a trial whose process could not do so itself, unless another process has taken it."""
        try:
            with Lock(self.out / trial.name, LOCK):
                record = read_record(self.out, trial)
                if not self._failed_now(trial, record):  # else torchrun did not pass on the code of its processes
                    attempts = max(record.get("attempts", 0), self.attempts.get(trial, 0) + 1)
                    record = {**record, "encoding": trial.encoding, "seed": trial.seed, "attempts": attempts}
                    record["error"] = end.reason(f"see {trial.name}/{LOG}.")
                    write_record(self.out, trial, record)
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
        words = [self._count(), *self.active_words(logs)]
        if not self.executor.running and self.held:
            words.append("waiting for " + ", ".join(f"{trial.name} ({self._holder(trial)})" for trial in self.held))
        durations = [record["seconds"] for record in self.over.values() if record.get("error") is None]
        if durations:
            mean, active = statistics.fmean(durations), self.executor.active
            waiting = len(self.comparison.trials()) - len(self.over) - len(active)
            rest = sum(max(mean - self.executor.seconds(name), 0.0) for name in active)
            left = (mean * waiting + rest) / (self.executor.places or max(1, len(active)))
            words.append(f"about {clock_time(left)} left")
        return "  |  ".join(words)


# -- One trial, in a process of its own


def run_trial(comparison: Comparison, out: Path, trial: Trial, threads: int) -> int:
    """Train and evaluate a trial and write its record. The caller holds the trial's lock."""
    started = time.monotonic()
    record = read_record(out, trial)
    attempts = record.get("attempts", 0) + 1
    record = {**record, "encoding": trial.encoding, "seed": trial.seed, "error": None, "attempts": attempts}
    try:
        _measure(comparison, out, trial, threads, record)
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())[:500]
        clear = isinstance(error, ValueError | OSError) and text
        record["error"] = text if clear else f"{type(error).__name__}: {text}"
    record["seconds"] = round(time.monotonic() - started, 1)
    write_record(out, trial, record)
    return DONE if record["error"] is None else FAILED


def _measure(comparison: Comparison, out: Path, trial: Trial, threads: int, record: TrialRecord) -> None:
    import torch

    torch.set_num_threads(threads)
    if not trained(record, out, trial):
        record["machine"] = _machine(threads)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        begin_peak(device)
        result = _train(comparison, out, trial, threads)
        speeds = [entry["tokens_per_second"] for entry in read_log(out / trial.name) if "tokens_per_second" in entry]
        # The median, because the first steps are slower and other programs may use the machine for a while.
        speed = statistics.median(speeds)
        record["training"] = {**result, "tokens_per_second": speed, "peak_memory_bytes": peak(device)}
        _, record["about"] = read_about(out / trial.name)
        write_record(out, trial, record)  # if the evaluation is interrupted, the trial is not trained again

    from relpos.evaluation.evaluation import evaluate
    from relpos.runs.run import open_run

    run, split = open_run(out / trial.name), comparison.split
    for name in comparison.protocols:
        record[name] = evaluate(run, comparison.lengths, name, eval_tokens=comparison.scored(name), split=split)
    if trial.seed == 0 and comparison.positions is not None:
        tokens = comparison.scored("positions")
        record["positions"] = evaluate(run, [comparison.positions], "positions", eval_tokens=tokens, split=split)


def _train(comparison: Comparison, out: Path, trial: Trial, threads: int) -> RunResult:
    import torch

    from relpos.training.training import train

    torch.set_num_threads(threads)
    return train(comparison.settings_of(trial, out))


def _machine(threads: int) -> Machine:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if sys.platform == "linux" else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_bytes": memory_of_machine(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _help_to_train(comparison: Comparison, out: Path, trial: Trial, threads: int) -> int:
    """Train together with the first process, which measures and writes the record."""
    if trained(read_record(out, trial), out, trial):  # else written only when all processes have trained
        return DONE
    try:
        _train(comparison, out, trial, threads)
    except Exception:
        traceback.print_exc()
        time.sleep(GRACE)  # torchrun ends all processes when one has failed
        return FAILED
    return DONE


def main() -> int:
    """Run the trial of the command line, unless another process runs it."""
    folder, encoding, seed, threads = sys.argv[1:]
    out, trial = Path(folder), Trial(encoding, int(seed))
    end_with_parent()
    comparison = load_comparison(out)
    try:
        if int(os.environ.get("RANK", "0")) > 0:
            return _help_to_train(comparison, out, trial, int(threads))
        with Lock(out / trial.name, LOCK):
            if finished(read_record(out, trial), comparison, trial):  # another process has just finished it
                return DONE
            return run_trial(comparison, out, trial, int(threads))
    except HeldError:
        return HELD
    finally:
        leave_group()


if __name__ == "__main__":
    sys.exit(main())
