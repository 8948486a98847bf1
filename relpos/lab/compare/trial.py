"""One part of a comparison, trained and evaluated in a process of its own.

python -m relpos.lab.compare.trial FOLDER ENCODING SEED THREADS

So a crash of one part, or the system ending it for want of memory, is one failed row. What is heavy is imported only
once the part's lock is held.
"""

import json
import os
import platform
import statistics
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from relpos.lab.compare.comparison import Comparison, Trial, load_plan
from relpos.system.files import write_text
from relpos.system.lock import HeldError, Lock
from relpos.system.mappings import read_json

RECORD, LOG, LOCK = "part.json", "part.log", ".part.lock"  # in a part's folder
DONE, FAILED, HELD = 0, 65, 75  # how its process ends; any other way (1 is Python's own) is a crash


def read_record(out: Path, part: Trial) -> dict[str, Any]:
    """What is known of a part: empty if it has not been tried."""
    try:
        return read_json(out / part.name / RECORD)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{error} Remove it: what was trained stays, and is evaluated.") from error


def write_record(out: Path, part: Trial, record: dict[str, Any]) -> None:
    """Keep what is known of a part."""
    write_text(out / part.name / RECORD, json.dumps(record, indent=1))


def finished(record: dict[str, Any], plan: Comparison, part: Trial) -> bool:
    """Whether nothing is left to do: a part is taken up again when lengths have been added.

    And when it was measured by an earlier version, which kept no losses of documents; nothing is trained again.
    """
    if record.get("error") is not None or "windows" not in record:
        return False
    measured = {row["length"] for row in record["windows"]["rows"] if "units" in row}
    return measured >= set(plan.lengths) and (part.seed > 0 or "positions" in record)


def run_part(plan: Comparison, out: Path, part: Trial, threads: int) -> bool:
    """Train and evaluate a part, and keep what came of it; whether it went well. Its lock must be held."""
    begun = time.monotonic()
    record = read_record(out, part)
    record |= {"encoding": part.encoding, "seed": part.seed, "error": None, "attempts": record.get("attempts", 0) + 1}
    try:
        _measure(plan, out, part, threads, record)
    except Exception as error:
        traceback.print_exc()
        record["error"] = sentence(error)
    record["seconds"] = round(time.monotonic() - begun, 1)
    write_record(out, part, record)
    return record["error"] is None


def sentence(error: Exception) -> str:
    """What went wrong, on one line."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, ValueError | OSError) and text else f"{type(error).__name__}: {text}"


def _measure(plan: Comparison, out: Path, part: Trial, threads: int, record: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(threads)
    if "training" not in record:
        record["machine"] = _machine(threads)
        record["training"], record["about"] = _train(plan, out, part)
        write_record(out, part, record)  # no error, and not finished: training is not done again

    from relpos.lab.evaluate.evaluation import evaluate
    from relpos.lab.runs.run import open_run

    run = open_run(out / part.name)
    record["windows"] = evaluate(run, plan.lengths, "windows", eval_tokens=plan.eval_tokens)
    if part.seed == 0:
        record["positions"] = evaluate(run, [plan.positions], "positions", eval_tokens=plan.eval_tokens)


def _train(plan: Comparison, out: Path, part: Trial) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch

    from relpos.lab.runs.log_file import read_log
    from relpos.lab.runs.run import read_about
    from relpos.lab.train.training import train
    from relpos.system.memory import begin_peak, peak

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begin_peak(device)
    result = train(plan.settings_of(part, out))
    _, about = read_about(out / part.name)
    speeds = [entry["tokens_per_second"] for entry in read_log(out / part.name) if "tokens_per_second" in entry]
    # The median: the first steps are slower, and now and then something else wants the machine.
    return {**result, "tokens_per_second": statistics.median(speeds), "peak_memory_bytes": peak(device)}, about


def _machine(threads: int) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if sys.platform == "linux" else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
    }


def end_with_parent() -> None:
    """End when the process that started this one does, however it does: its end of our standard input closes."""

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)  # nothing is ever written: it gives way when the other end is gone
        os._exit(FAILED)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """Run the part that the command line names, unless another process has it."""
    folder, encoding, seed, threads = sys.argv[1:]
    out, part = Path(folder), Trial(encoding, int(seed))
    end_with_parent()
    plan = load_plan(out)
    try:
        with Lock(out / part.name, LOCK):
            if finished(read_record(out, part), plan, part):  # by another process, just now
                return DONE
            return DONE if run_part(plan, out, part, int(threads)) else FAILED
    except HeldError:
        return HELD


if __name__ == "__main__":
    sys.exit(main())
