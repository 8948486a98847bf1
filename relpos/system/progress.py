"""A line that shows progress: rich replaces it in a terminal; elsewhere lines are printed below each other."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.live import Live


class LiveLine:
    """A line that is shown again and again, by default on what is standard output at the time.

    Outside a terminal it is printed after `first` seconds and then at most every `every` seconds.
    """

    def __init__(self, stream: TextIO | None = None, every: float = 0.0, first: float = 0.0) -> None:
        self.stream, self.every, self.next = stream, every, time.monotonic() + first
        self._live: Live | None = None

    def __call__(self, text: str | Callable[[], str]) -> None:
        """Show a text, or what a function returns, which is called only if it is time for a line."""
        if (self.stream or sys.stdout).isatty():
            from rich.text import Text

            line = text if isinstance(text, str) else text()
            self._terminal().update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif time.monotonic() >= self.next:
            self.next = time.monotonic() + self.every
            print(text if isinstance(text, str) else text(), flush=True, file=self.stream)

    def _terminal(self) -> "Live":
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self.stream, force_terminal=True)
            self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
            console.show_cursor()  # which would stay hidden after Ctrl-C
        return self._live

    def clear(self, keep: bool = False) -> None:
        """Remove the line, or keep it; what is printed next starts on a line of its own."""
        if self._live is not None:
            self._live.transient = not keep
            self._live.stop()
            self._live = None

    def end(self) -> None:
        self.clear(keep=True)


class Countdown:
    """Reports every few seconds where the work is and how long the rest will take.

    `total` is in any unit; 0 if it is not known, and then nothing is said about the rest.
    """

    def __init__(self, total: float, say: Callable[[str], object], every: float = 5.0) -> None:
        self.total, self.say, self.every = total, say, every
        self.done, self.started = 0.0, time.monotonic()
        self.last_message = self.started

    def skip(self, amount: float) -> None:
        """Leave out work that was done before the countdown started."""
        self.total -= amount

    def step(self, amount: float, message: str) -> None:
        """Add an amount of finished work; the message says where the work is."""
        self.done += amount
        now = time.monotonic()
        if now - self.last_message >= self.every:
            self.last_message = now
            left = (self.total - self.done) * (now - self.started) / self.done
            self.say(f"{message}  {clock_time(left)} left" if self.total else message)


def clock_time(seconds: float) -> str:
    """Format seconds as minutes and seconds: 75 is "1:15"."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
