"""Run the parts of a comparison: several at once, beside other processes and machines that share the folder."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relpos.lab.compare.comparison import Trial, load_plan
from relpos.lab.compare.trial import DONE, FAILED, HELD, LOCK, LOG, finished, read_record, write_record
from relpos.system.lock import HeldError, Lock
from relpos.system.progress import LiveLine, clock_time

BEAT = 0.3  # seconds between two looks at the parts
EVERY = 60.0  # seconds between two lines where they do not replace each other
AGAIN = 5.0  # seconds until a part that another process holds is tried again


def compare(
    out: Path, workers: int = 1, say: Callable[[str], None] = print, after: Callable[[], object] | None = None
) -> dict[Trial, str]:
    """Run every part of the folder's plan that is not finished; give those that failed, each with its sentence.

    `after` is called whenever a part has ended. A part that failed before is tried once more; one that fails now is
    passed over. A part held by another process is left to it, and waited for.
    """
    crew = Crew(out, workers, say)
    try:
        while crew.step():
            if crew.news and after is not None:
                crew.news = False
                after()
            crew.show()
            time.sleep(BEAT)
    finally:
        crew.stop()
    if after is not None:
        after()
    return crew.failed()


class Crew:
    """The processes that run parts here, and what is left to do."""

    def __init__(self, out: Path, workers: int, say: Callable[[str], None]) -> None:
        if workers < 1:
            raise ValueError(f"--workers must be at least 1, not {workers}.")
        self.out, self.workers, self.say = out, workers, say
        self.threads = max(1, (os.cpu_count() or 1) // workers)
        self.plan = load_plan(out)
        # A failure counts as this comparison's own only if it came after this moment.
        self.attempts = {part: int(self._record(part).get("attempts", 0)) for part in self.plan.parts()}
        self.running: dict[Trial, tuple[subprocess.Popen[bytes], float]] = {}
        self.held: dict[Trial, float] = {}  # by others, and when to try again
        self.over: dict[Trial, dict[str, Any]] = {}  # finished or failed, with what is known of them
        self.news = False
        self.line = LiveLine(sys.stderr)
        self.next_line = time.monotonic() + EVERY

    def step(self) -> bool:
        """Notice what has ended, begin what can begin; whether there is anything left."""
        self.plan = load_plan(self.out)  # another process may have added to it
        for part, (process, begun) in list(self.running.items()):
            code = process.poll()
            if code is not None:
                del self.running[part]
                process.communicate()  # closes what leads to it
                self._end(part, code, time.monotonic() - begun)
        for part in self._left():
            if len(self.running) >= self.workers:
                break
            if part not in self.running and self.held.get(part, 0.0) <= time.monotonic():
                self._begin(part)
        return bool(self.running or self._left())

    def failed(self) -> dict[Trial, str]:
        """The parts that have failed, each with its sentence."""
        errors = {part: self._record(part).get("error") for part in self.plan.parts()}
        return {part: error for part, error in errors.items() if error is not None}

    def stop(self) -> None:
        """End the processes that are still running; their checkpoints stay."""
        self.line.clear()
        for process, _ in self.running.values():
            process.terminate()
        for process, _ in self.running.values():
            process.communicate()  # waits, and closes what leads to it

    def show(self) -> None:
        """The live line; where it is no terminal, now and then."""
        if sys.stderr.isatty():
            self.line(self._line()[: os.get_terminal_size(sys.stderr.fileno()).columns - 1])
        elif time.monotonic() >= self.next_line:
            self.next_line = time.monotonic() + EVERY
            self.line(self._line())

    def _record(self, part: Trial) -> dict[str, Any]:
        return read_record(self.out, part)

    def _left(self) -> list[Trial]:
        """The parts that are neither finished nor have failed since this began."""
        for part in self.plan.parts():
            if part in self.over or part in self.running:
                continue
            record = self._record(part)
            tried = int(record.get("attempts", 0)) > self.attempts.get(part, 0)
            if finished(record, self.plan, part) or (tried and record["error"] is not None):
                self.over[part] = record
                self.news = self.news or self.held.pop(part, None) is not None
        return [part for part in self.plan.parts() if part not in self.over]

    def _begin(self, part: Trial) -> None:
        folder = self.out / part.name
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "relpos.lab.compare.trial", str(self.out), part.encoding, str(part.seed)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1"}
        with (folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                [*command, str(self.threads)],
                stdin=subprocess.PIPE,  # closes when this process ends, and the part ends with it
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for this process, which then stops its parts
            )
        self.running[part] = process, time.monotonic()

    def _end(self, part: Trial, code: int, seconds: float) -> None:
        if code not in (DONE, FAILED, HELD):
            code = self._record_crash(part, code)
        if code == HELD:
            if part not in self.held:
                self.tell(f"{part.name} is held by {self._holder(part)}")
            self.held[part] = time.monotonic() + AGAIN
            return
        self.news = True
        self.over[part] = self._record(part)
        self.held.pop(part, None)
        error = self.over[part].get("error")
        words = f"done in {clock_time(seconds)}" if error is None else f"failed after {clock_time(seconds)}: {error}"
        self.tell(f"{part.name} {words}   ({self._count()})")

    def _record_crash(self, part: Trial, code: int) -> int:
        """Write down for a part that it failed, since its process could not; unless another has taken it up."""
        why = f"its process ended with code {code}: see {part.name}/{LOG}."
        if code < 0:
            name = signal.Signals(-code).name
            memory = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
            why = f"its process was ended by {name}{memory}."
        try:
            with Lock(self.out / part.name, LOCK):
                record = self._record(part)
                attempts = max(int(record.get("attempts", 0)), self.attempts.get(part, 0) + 1)
                record |= {"encoding": part.encoding, "seed": part.seed, "error": why, "attempts": attempts}
                write_record(self.out, part, record)
        except HeldError:
            return HELD
        return FAILED

    def _holder(self, part: Trial) -> str:
        return (self.out / part.name / LOCK).read_text(encoding="utf-8").strip() or "another process"

    def tell(self, text: str) -> None:
        """A line that stays, above the live one."""
        self.line.clear()
        self.say(text)

    def _count(self) -> str:
        failed = sum(record.get("error") is not None for record in self.over.values())
        return f"{len(self.over)} of {len(self.plan.parts())} parts" + (f", {failed} failed" if failed else "")

    def _line(self) -> str:
        words = [self._count()]
        words += [f"{part.name}: {last_line(self.out / part.name / LOG)}" for part in self.running]
        if not self.running and self.held:
            words.append("waiting for " + ", ".join(f"{part.name} ({self._holder(part)})" for part in self.held))
        left = self._seconds_left()
        return "  |  ".join([*words, f"about {clock_time(left)} left"] if left is not None else words)

    def _seconds_left(self) -> float | None:
        """By the mean of the parts that are finished."""
        took = [float(record["seconds"]) for record in self.over.values() if record.get("error") is None]
        if not took:
            return None
        mean, now = sum(took) / len(took), time.monotonic()
        waiting = len(self.plan.parts()) - len(self.over) - len(self.running)
        running = sum(max(mean - (now - begun), 0.0) for _, begun in self.running.values())
        return (mean * waiting + running) / self.workers


def last_line(log: Path) -> str:
    """The first words of the last line that a part has printed."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2000))
        lines = file.read().decode(errors="replace").split("\n")
    line = next((line for line in reversed(lines) if line.strip()), "starting")
    return "  ".join(line.strip().split("  ")[:2])[:60]
