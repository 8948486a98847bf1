"""One trial of a comparison, trained and evaluated in a process of its own.

python -m relpos.comparison.trial FOLDER ENCODING SEED THREADS

If the process crashes, or the system kills it because memory runs out, only this trial fails. Slow imports come after
the trial's lock is held. Started by torchrun, the first process does this and the others help it to train.
"""

import json
import os
import platform
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import TypedDict, cast

from relpos.comparison.comparison import Comparison, Trial, load_comparison
from relpos.runs.results import About, RunResult, TextResult, read_about
from relpos.system.files import write_text
from relpos.system.lock import HeldError, Lock
from relpos.system.mappings import read_json
from relpos.system.memory import memory_of_machine
from relpos.system.processes import end_with_parent

RECORD, LOG, LOCK = "trial.json", "trial.log", ".trial.lock"  # in a trial's folder
GRACE = 30.0  # seconds until a process that helped to train ends after an error: the first one records the reason
DONE, FAILED, HELD = 0, 65, 75  # exit codes of a trial's process; any other (Python's own is 1) is a crash


class Machine(TypedDict):
    """Where a trial ran."""

    cpu: str
    cores: int | None
    threads: int
    memory_bytes: int
    system: str


class TrialTraining(RunResult):
    """How the training of a trial ended, with its speed and memory."""

    tokens_per_second: float
    peak_memory_bytes: int


class TrialRecord(TypedDict, total=False):
    """How often a trial was tried, its error, and what was measured so far."""

    encoding: str
    seed: int
    error: str | None
    attempts: int
    seconds: float
    machine: Machine
    training: TrialTraining
    about: About  # as in run.yaml
    windows: TextResult
    positions: TextResult


def read_record(out: Path, trial: Trial) -> TrialRecord:
    """Read the record of a trial: how often it was tried, its error, and what was measured.

    Args:
        out: The comparison's folder.
        trial: The trial.

    Returns:
        The record; empty if the trial has not been tried.

    Raises:
        ValueError: The file is damaged.
    """
    try:
        return cast(TrialRecord, read_json(out / trial.name / RECORD))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{error} Remove the file: the trained model is kept and will be evaluated.") from error


def write_record(out: Path, trial: Trial, record: TrialRecord) -> None:
    """Write the record of a trial, which `read_record` reads."""
    write_text(out / trial.name / RECORD, json.dumps(record, indent=1))


def finished(record: TrialRecord, comparison: Comparison, trial: Trial) -> bool:
    """Whether nothing is left to do for a trial.

    A trial to which lengths have been added is not finished: it is evaluated again, but not trained again.
    """
    if record.get("error") is not None or "windows" not in record:
        return False
    measured = {row["length"] for row in record["windows"]["rows"]}
    return measured >= set(comparison.lengths) and (trial.seed > 0 or "positions" in record)


def run_trial(comparison: Comparison, out: Path, trial: Trial, threads: int) -> bool:
    """Train and evaluate a trial and write its record. The caller must hold the trial's lock.

    Args:
        comparison: The comparison that the trial belongs to.
        out: The comparison's folder.
        trial: The trial.
        threads: The number of threads of PyTorch.

    Returns:
        Whether it succeeded; if not, the record holds the error.
    """
    started = time.monotonic()
    record = read_record(out, trial)
    attempts = record.get("attempts", 0) + 1
    record = {**record, "encoding": trial.encoding, "seed": trial.seed, "error": None, "attempts": attempts}
    try:
        _measure(comparison, out, trial, threads, record)
    except Exception as error:
        traceback.print_exc()
        record["error"] = sentence(error)
    record["seconds"] = round(time.monotonic() - started, 1)
    write_record(out, trial, record)
    return record["error"] is None


def sentence(error: Exception) -> str:
    """The message of an error on one line, with the name of its type if the message alone may not be clear."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, ValueError | OSError) and text else f"{type(error).__name__}: {text}"


def _measure(comparison: Comparison, out: Path, trial: Trial, threads: int, record: TrialRecord) -> None:
    import torch

    torch.set_num_threads(threads)
    if "training" not in record:
        record["machine"] = _machine(threads)
        record["training"], record["about"] = _train(comparison, out, trial)
        write_record(out, trial, record)  # if the evaluation is interrupted, the trial is not trained again

    from relpos.evaluation.evaluation import evaluate
    from relpos.runs.run import open_run

    run = open_run(out / trial.name)
    record["windows"] = evaluate(run, comparison.lengths, "windows", eval_tokens=comparison.eval_tokens)
    if trial.seed == 0:
        record["positions"] = evaluate(run, [comparison.positions], "positions", eval_tokens=comparison.eval_tokens)


def _train(comparison: Comparison, out: Path, trial: Trial) -> tuple[TrialTraining, About]:
    import torch

    from relpos.runs.checkpoints import read_log
    from relpos.system.memory import begin_peak, peak
    from relpos.training.training import train

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begin_peak(device)
    result = train(comparison.settings_of(trial, out))
    _, about = read_about(out / trial.name)
    speeds = [entry["tokens_per_second"] for entry in read_log(out / trial.name) if "tokens_per_second" in entry]
    # The median, because the first steps are slower and other programs may use the machine for a while.
    return {**result, "tokens_per_second": statistics.median(speeds), "peak_memory_bytes": peak(device)}, about


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


def _help(comparison: Comparison, out: Path, trial: Trial, threads: int) -> int:
    """Train together with the first process, which measures and writes the record."""
    if "training" in read_record(out, trial):  # else written only when all processes have trained
        return DONE
    import torch

    from relpos.training.training import train

    torch.set_num_threads(threads)
    try:
        train(comparison.settings_of(trial, out))
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
    if int(os.environ.get("RANK", "0")) > 0:
        return _help(comparison, out, trial, int(threads))
    try:
        with Lock(out / trial.name, LOCK):
            if finished(read_record(out, trial), comparison, trial):  # another process has just finished it
                return DONE
            return DONE if run_trial(comparison, out, trial, int(threads)) else FAILED
    except HeldError:
        return HELD


if __name__ == "__main__":
    sys.exit(main())
