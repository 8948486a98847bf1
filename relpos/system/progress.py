"""A line that tells how far the work is."""

import sys
import time
from collections.abc import Callable
from typing import TextIO


class LiveLine:
    """Prints a line: over the last one in a terminal, a new one elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream  # standard output unless given
        self.width = 0

    def __call__(self, line: str) -> None:
        stream = self.stream or sys.stdout
        if stream.isatty():
            print("\r" + line.ljust(self.width), end="", flush=True, file=stream)
            self.width = len(line)
        else:
            print(line, flush=True, file=stream)

    def clear(self) -> None:
        """Wipe the line away, for another that stays."""
        if self.width:
            print("\r" + " " * self.width, end="\r", flush=True, file=self.stream or sys.stdout)
            self.width = 0

    def end(self) -> None:
        """Leave the last line as it stands."""
        if self.width:
            print(file=self.stream or sys.stdout)
            self.width = 0


class Countdown:
    """Says every few seconds how much of the work is done, and how long the rest will take."""

    def __init__(self, total: float, say: Callable[[str], object], every: float = 5.0) -> None:
        self.total, self.say, self.every = total, say, every
        self.done, self.begun = 0.0, time.monotonic()
        self.told = self.begun

    def skip(self, amount: float) -> None:
        """Work that had been done before."""
        self.total -= amount

    def step(self, amount: float, words: str) -> None:
        """Some more is done; `words` tell where in the work that was."""
        self.done += amount
        now = time.monotonic()
        if now - self.told >= self.every:
            self.told = now
            left = (self.total - self.done) * (now - self.begun) / self.done
            self.say(f"{words}  {clock_time(left)} left")


def clock_time(seconds: float) -> str:
    """Minutes and seconds, as on a clock."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
