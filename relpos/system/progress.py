"""Lines that show progress."""

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO


class LiveLine:
    """Prints a line that replaces the previous one in a terminal; elsewhere each line is printed below the last.

    Args:
        stream: Where to print; standard output by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self.width = 0

    @property
    def stream(self) -> TextIO:
        """The stream; standard output is looked up at every call, because tests replace it."""
        return self._stream or sys.stdout

    def __call__(self, line: str) -> None:
        if self.stream.isatty():
            print("\r" + line.ljust(self.width), end="", flush=True, file=self.stream)
            self.width = len(line)
        else:
            print(line, flush=True, file=self.stream)

    def clear(self) -> None:
        """Remove the line, so that another text can be printed in its place."""
        if self.width:
            print("\r" + " " * self.width, end="\r", flush=True, file=self.stream)
            self.width = 0

    def end(self) -> None:
        """Keep the line; what is printed next starts on a new line."""
        if self.width:
            print(file=self.stream)
            self.width = 0


class StatusLine(LiveLine):
    """A live line on standard error that is updated often: outside a terminal it is printed every few seconds only.

    Args:
        every: Seconds between two lines outside a terminal.
        first: Seconds until the first line outside a terminal.
    """

    def __init__(self, every: float, first: float = 0.0) -> None:
        super().__init__(sys.stderr)
        self.every, self.next = every, time.monotonic() + first

    def update(self, line: Callable[[], str]) -> None:
        """Print what `line` returns, cut to the width of the terminal; outside a terminal, if it is time."""
        if self.stream.isatty():
            self(line()[: os.get_terminal_size(self.stream.fileno()).columns - 1])
        elif time.monotonic() >= self.next:
            self.next = time.monotonic() + self.every
            self(line())


class FractionLine(StatusLine):
    """Shows the completed fraction and the time left; nothing if the work takes less than two seconds.

    Args:
        verb: What is being done: "drawing".
        every: Seconds between two lines outside a terminal.
        first: Seconds until the first line.
    """

    def __init__(self, verb: str, every: float = 10.0, first: float = 2.0) -> None:
        super().__init__(every, first)
        self.verb, self.start, self.next_in_terminal = verb, time.monotonic(), self.next

    def show(self, done: float) -> None:
        """Show the completed fraction; 1 is all of it."""
        now = time.monotonic()
        if done >= 1:
            self.clear()
        elif done > 0 and now >= self.next_in_terminal:
            self.next_in_terminal = now + 0.1
            left = time_left(now - self.start, done, 1.0)
            self.update(lambda: f"{self.verb} {done:4.0%}  {left}")


class Countdown:
    """Reports every few seconds where the work is and how long the rest will take.

    Args:
        total: The amount of work, in any unit.
        say: Receives each message.
        every: Seconds between two messages.
    """

    def __init__(self, total: float, say: Callable[[str], object], every: float = 5.0) -> None:
        self.total, self.say, self.every = total, say, every
        self.done, self.started = 0.0, time.monotonic()
        self.last_message = self.started

    def skip(self, amount: float) -> None:
        """Leave out work that was done before the countdown started."""
        self.total -= amount

    def step(self, amount: float, message: str) -> None:
        """Add an amount of finished work.

        Args:
            amount: The work done since the last call.
            message: Where the work is; the remaining time is printed after it.
        """
        self.done += amount
        now = time.monotonic()
        if now - self.last_message >= self.every:
            self.last_message = now
            self.say(f"{message}  {time_left(now - self.started, self.done, self.total)}")


def time_left(seconds: float, done: float, total: float) -> str:
    """How long the rest of the work takes at the speed so far: "0:09 left"."""
    return f"{clock_time((total - done) * seconds / done)} left"


def clock_time(seconds: float) -> str:
    """Format seconds as minutes and seconds: 75 is "1:15"."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
