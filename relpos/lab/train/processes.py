"""Trainings in processes of their own, several at once, and one line that says how far they are.

python -m relpos.lab.train.processes THREADS SETTINGS

runs one of them; SETTINGS is JSON, by dotted key. The number of threads is fixed, because it decides in which order
sums are added up: with the same number, the same kind of CPU gives the same weights.
"""

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from relpos.lab.compare.trial import end_with_parent
from relpos.lab.runs.log_file import read_log
from relpos.lab.runs.settings import load_settings
from relpos.system.progress import LiveLine, clock_time

BEAT = 0.5  # seconds between two looks at the trainings
EVERY = 15.0  # seconds between two lines where they do not replace each other
FAILED = 2  # how a training that has said why ends


def train_apart(
    trainings: Mapping[str, Mapping[str, Any]], workers: int, threads: int, every: float = EVERY
) -> Generator[tuple[str, str | None]]:
    """Train several models, `workers` at once with `threads` each.

    Args:
        trainings: Name of each: its settings by dotted key, with run.out and run.steps or run.minutes.
        workers: How many run at once.
        threads: Of each.
        every: Seconds between two lines of progress where standard error is no terminal.

    Yields:
        The name of each training as it ends, and what went wrong in a sentence, or None.
    """
    crew = _Crew(trainings, workers, threads, every)
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    names = {pool.submit(crew.train, name): name for name in trainings}
    waiting = set(names)
    try:
        while waiting:
            ended, waiting = concurrent.futures.wait(waiting, BEAT, concurrent.futures.FIRST_COMPLETED)
            for one in ended:
                crew.line.clear()
                yield names[one], one.result()
            if waiting:
                crew.show()
    finally:
        crew.line.clear()
        pool.shutdown(wait=False, cancel_futures=True)
        crew.stop()
        pool.shutdown()


class _Crew:
    """The processes, and how far each is."""

    def __init__(self, trainings: Mapping[str, Mapping[str, Any]], workers: int, threads: int, every: float) -> None:
        self.trainings, self.workers, self.threads, self.every = trainings, workers, threads, every
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.over: set[str] = set()
        self.line = LiveLine(sys.stderr)
        self.next_line = time.monotonic()
        self.lock, self.stopped = threading.Lock(), False

    def train(self, name: str) -> str | None:
        """Run one training to its end; what went wrong, in a sentence."""
        command = [sys.executable, "-m", "relpos.lab.train.processes", str(self.threads)]
        with self.lock:
            if self.stopped:
                return "it was not begun."
            process = subprocess.Popen(
                [*command, json.dumps(dict(self.trainings[name]))],
                stdin=subprocess.PIPE,  # closes when this process ends, and the training ends with it
                stdout=subprocess.DEVNULL,  # what it says is in its log.jsonl too
                stderr=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": str(self.threads)},
                start_new_session=True,  # Ctrl-C is for this process, which then stops its trainings
                text=True,
            )
            self.running[name] = process
        with process:
            assert process.stderr is not None
            said = process.stderr.read()  # to its end; communicate() would close its standard input, and end it
            code = process.wait()
        del self.running[name]
        self.over.add(name)
        return _sentence(code, said)

    def stop(self) -> None:
        """End the processes that are still running; their checkpoints stay."""
        with self.lock:
            self.stopped = True
        for process in list(self.running.values()):
            process.terminate()

    def show(self) -> None:
        """The line; where it is no terminal, now and then."""
        now = time.monotonic()
        if sys.stderr.isatty():
            self.line(self._words()[: os.get_terminal_size(sys.stderr.fileno()).columns - 1])
        elif now >= self.next_line:
            self.next_line = now + self.every
            self.line(self._words())

    def _words(self) -> str:
        running = list(self.running)
        done = {name: self._done(name) for name in running}
        words = [f"{len(self.over)} of {len(self.trainings)} trained"]
        words += [f"{name} {share:.0%}" for name, (share, _) in done.items()]
        speeds = [share / seconds for share, seconds in done.values() if share > 0 and seconds > 0]
        if speeds:
            waiting = len(self.trainings) - len(self.over) - len(running)
            left = makespan([1 - share for share, _ in done.values()] + [1.0] * waiting, self.workers)
            words.append(f"about {clock_time(left * len(speeds) / sum(speeds))} left")
        return "  ".join(words)

    def _done(self, name: str) -> tuple[float, float]:
        """How much of a training is done, and the seconds that it took."""
        settings = self.trainings[name]
        last = (read_log(Path(settings["run.out"])) or [{"step": 0, "seconds": 0.0}])[-1]
        shares = [0.0]
        if settings.get("run.steps"):
            shares.append(last["step"] / settings["run.steps"])
        if settings.get("run.minutes"):
            shares.append(last["seconds"] / (60 * settings["run.minutes"]))
        return min(1.0, max(shares)), last["seconds"]


def makespan(jobs: list[float], workers: int) -> float:
    """When the last of these jobs ends if each worker takes the next one, in their order."""
    free = [0.0] * workers
    for job in jobs:
        free.sort()
        free[0] += job
    return max(free)


def _sentence(code: int, said: str) -> str | None:
    """How a process ended, in words; None if well."""
    if code == 0:
        return None
    last = (said.strip().splitlines() or [""])[-1]
    if code == FAILED and last:
        return last
    if code < 0:
        memory = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
        return f"its process was ended by {signal.Signals(-code).name}{memory}."
    return f"its process ended with code {code}: {last}"


def main() -> int:
    """Run the training that the command line names."""
    threads, settings = sys.argv[1:]
    end_with_parent()
    try:
        checked = load_settings(None, json.loads(settings))  # before anything heavy is imported
        import torch

        from relpos.lab.train.training import silent, train

        torch.set_num_threads(int(threads))
        train(checked, silent)
    except (ValueError, TypeError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
