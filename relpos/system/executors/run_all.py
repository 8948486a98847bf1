"""Run all parts of a job, with one line of progress."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from relpos.system.executors.interface import Executor, Part
from relpos.system.processes import Exit
from relpos.system.progress import StatusLine, clock_time

POLL = 0.2  # seconds between two looks at the parts
EVERY = 15.0  # seconds between two lines of progress outside a terminal


def run_all(executor: Executor, parts: Mapping[str, Part], say: Callable[[str], object]) -> dict[str, Exit]:
    """Run parts that do not depend on each other. If interrupted, those that run are stopped.

    Args:
        executor: Where they run.
        parts: The parts by name.
        say: Receives a line when a part ends.

    Returns:
        How each part ended.
    """
    waiting = list(parts)
    ends: dict[str, Exit] = {}
    line = StatusLine(EVERY)
    try:
        while waiting or executor.running:
            for name, end in executor.ended().items():
                ends[name] = end
                result = "done in" if end.code == 0 else "failed after"
                line.clear()
                say(f"{name}: {result} {clock_time(end.seconds)}   ({len(ends)} of {len(parts)} parts)")
            for message in executor.messages():
                line.clear()
                say(message)
            while waiting and (executor.places is None or len(executor.running) < executor.places):
                name = waiting.pop(0)
                executor.start(name, parts[name])
            if executor.running:
                line.update(lambda: _progress(executor, parts, len(ends)))
                time.sleep(POLL)
    finally:
        line.clear()
        executor.stop()
    return ends


def last_line(log: Path) -> str:
    """The first words of the last line in a log; "starting" while the log is empty."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2000))
        lines = file.read().decode(errors="replace").split("\n")
    line = next((line for line in reversed(lines) if line.strip()), "starting")
    return "  ".join(line.strip().split("  ")[:2])[:60]


def _progress(executor: Executor, parts: Mapping[str, Part], ended: int) -> str:
    active = executor.active
    words = [f"{ended} of {len(parts)} parts", *(f"{name}: {last_line(parts[name].log)}" for name in active)]
    waiting = len(executor.running) - len(active)
    return "  |  ".join([*words, f"{waiting} waiting for a place"] if waiting else words)
