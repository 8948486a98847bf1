"""Train several models at the same time, each in a process of its own: python -m relpos.training.parallel SETTINGS.

The number of threads is fixed because it decides the order in which sums are added: with the same number, the same kind
of CPU computes the same weights.
"""

import contextlib
import json
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from relpos.runs.checkpoints import read_log
from relpos.runs.settings import load_settings
from relpos.system.executors import LocalExecutor, Part, Parts, end_with_parent, last_line
from relpos.system.progress import clock_time

FAILED = 2  # exit code of a training that has printed its error in a sentence
LOG = "training.log"  # in the run's folder, while it is trained


def train_in_parallel(
    trainings: Mapping[str, Mapping[str, Any]], workers: int, threads: int
) -> Generator[tuple[str, str | None]]:
    """Train several models by their settings by dotted key (with run.out and run.steps or run.minutes).

    Yields the name of each when it ends, and None or a sentence that says what went wrong.
    """
    work = Trainings(LocalExecutor(workers, threads), trainings)
    with contextlib.closing(work.run()) as ends:
        for name, end in ends:
            log = work.parts[name].log
            error = None if end.code == 0 else last_line(log) if end.code == FAILED else end.reason(last_line(log))
            log.unlink()
            yield name, error


class Trainings(Parts):
    """Trainings as parts; the line of progress says how much of each is done."""

    def __init__(self, executor: LocalExecutor, trainings: Mapping[str, Mapping[str, Any]]) -> None:
        folders = {name: Path(settings["run.out"]) for name, settings in trainings.items()}
        parts = {
            name: Part("relpos.training.parallel", (json.dumps(dict(trainings[name])),), folder, folder / LOG)
            for name, folder in folders.items()
        }
        super().__init__(executor, parts, print)
        self.trainings = trainings

    def progress(self) -> str:
        running, places = self.executor.running, self.executor.places or 1
        waiting = len(self.parts) - len(running) - len(self.ends)
        shares = {name: _share_done(self.trainings[name]) for name in running}
        words = [f"{len(self.ends)} of {len(self.parts)} trained"]
        words += [f"{name} {f'{share:.0%}' if seconds else 'starting'}" for name, (share, seconds) in shares.items()]
        speeds = [share / seconds for share, seconds in shares.values() if share > 0 and seconds > 0]
        if speeds:
            left = makespan([1 - share for share, _ in shares.values()] + [1.0] * waiting, places)
            words.append(f"about {clock_time(left * len(speeds) / sum(speeds))} left")
        return "  ".join(words)


def _share_done(settings: Mapping[str, Any]) -> tuple[float, float]:
    """How much of a training is done, from 0 to 1, and the seconds that this took."""
    last = (read_log(Path(settings["run.out"])) or [{"step": 0, "seconds": 0.0}])[-1]
    steps, minutes = settings.get("run.steps"), settings.get("run.minutes")
    shares = [last["step"] / steps if steps else 0.0, last["seconds"] / (60 * minutes) if minutes else 0.0]
    return min(1.0, max(shares)), last["seconds"]


def makespan(jobs: list[float], workers: int) -> float:
    """The time at which the last job ends if every worker that becomes free takes the next job."""
    free = [0.0] * workers
    for job in jobs:
        free.sort()
        free[0] += job
    return max(free)


def main() -> int:
    """Train with the settings of the command line, a JSON object by dotted key."""
    end_with_parent()
    try:
        settings = load_settings(None, json.loads(sys.argv[1]))  # before the slow imports
        from relpos.training.training import silent, train

        train(settings, silent)
    except (ValueError, TypeError, OSError) as error:
        print(" ".join(str(error).split()))
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
