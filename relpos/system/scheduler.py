"""Run parts that do not depend on each other over an executor: several at a time, with one line of progress."""

import contextlib
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Protocol

from relpos.system.executors.interface import Executor, Part
from relpos.system.processes import Exit
from relpos.system.progress import StatusLine, clock_time

POLL = 0.2  # seconds between two looks at the parts
EVERY = 15.0  # seconds between two lines of progress outside a terminal
READ = 4096  # bytes read from the end of a log


class Work(Protocol):
    """What there is to do."""

    def ready(self) -> Mapping[str, Part]:
        """The parts that may be started now, by name, in order; those that run may be among them."""

    def waits(self) -> bool:
        """Whether parts will become ready although none runs now."""

    def progress(self) -> str:
        """The line of progress."""

    def say(self, message: str) -> object:
        """Print a line that stays."""


def run_parts(work: Work, executor: Executor, every: float = EVERY) -> Generator[tuple[str, Exit]]:
    """Start parts as places become free. Closing the generator stops those that run.

    Args:
        work: The parts.
        executor: Where they run.
        every: Seconds between two lines of progress where standard error is not a terminal.

    Yields:
        The name of each part when it ends, and how it ended.
    """
    line = StatusLine(every, first=every)
    try:
        while True:
            for name, end in executor.ended().items():
                line.clear()
                yield name, end
            for message in executor.messages():
                line.clear()
                work.say(message)
            for name, part in work.ready().items():
                if executor.places is not None and len(executor.running) >= executor.places:
                    break
                if name not in executor.running:
                    executor.start(name, part)
            if not executor.running and not work.waits():
                return
            line.update(work.progress)
            time.sleep(POLL)
    finally:
        line.clear()
        executor.stop()  # what the parts have written stays


class Parts:
    """A fixed number of parts, each run once.

    Args:
        executor: Where they run.
        parts: The parts by name.
        say: Receives a line when something happens to the machines of a cluster.
    """

    def __init__(self, executor: Executor, parts: Mapping[str, Part], say: Callable[[str], object]) -> None:
        self.executor, self.parts, self._say = executor, parts, say
        self.ends: dict[str, Exit] = {}

    def run(self, every: float = EVERY) -> Generator[tuple[str, Exit]]:
        """Run all parts; yields each when it ends."""
        with contextlib.closing(run_parts(self, self.executor, every)) as ends:
            for name, end in ends:
                self.ends[name] = end
                yield name, end

    def ready(self) -> dict[str, Part]:
        return {name: part for name, part in self.parts.items() if name not in self.ends}

    def waits(self) -> bool:
        return False

    def progress(self) -> str:
        words = [f"{len(self.ends)} of {len(self.parts)} parts"]
        return "  |  ".join([*words, *active_words(self.executor, {name: p.log for name, p in self.parts.items()})])

    def say(self, message: str) -> object:
        return self._say(message)

    def summary(self, name: str, end: Exit) -> str:
        """A line that says how a part ended."""
        result = "done in" if end.code == 0 else "failed after"
        return f"{name}: {result} {clock_time(end.seconds)}   ({len(self.ends)} of {len(self.parts)} parts)"


def active_words(executor: Executor, logs: Mapping[str, Path]) -> list[str]:
    """What the running parts do, by the last lines of their logs, and how many wait for a place."""
    running, active = executor.running, executor.active
    words = [f"{name}: {'  '.join(last_line(logs[name]).split('  ')[:2])[:60]}" for name in active]
    return [*words, f"{len(running) - len(active)} waiting for a place"] if len(running) > len(active) else words


def last_line(log: Path) -> str:
    """The last line in a log; "starting" while the log is empty."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - READ))
        lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "starting")
