"""Child processes: started with a fixed number of threads, watched, stopped together, and never left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ORPHANED = 65  # exit code of a child whose parent has ended; nobody is left to read it
NEW_GROUP: int = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # Windows only


@dataclass(frozen=True)
class Exit:
    """How a process ended."""

    code: int  # if negative, the number of the signal that ended the process (not on Windows)
    seconds: float
    failure: str | None = None  # a sentence where the process cannot say it itself: its machine was lost

    def reason(self, details: str = "") -> str:
        """Why the process ended, in a sentence; `details` follow the exit code."""
        if self.failure is not None:
            return self.failure
        if self.code < 0:
            name = signal.Signals(-self.code).name
            memory = ", as the system does when memory runs out" if name == "SIGKILL" else ""
            return f"its process was ended by {name}{memory}."
        return f"its process ended with code {self.code}: {details}"


class Children:
    """The child processes of this process, by name. Each must call `end_with_parent` when it starts.

    Ctrl-C reaches this process only, which then calls `stop`.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads  # of each child
        self._children: dict[str, tuple[subprocess.Popen[bytes], float]] = {}  # and when each was started

    @property
    def running(self) -> list[str]:
        """The children that have not been reported by `ended`, in the order in which they were started."""
        return list(self._children)

    def start(self, name: str, arguments: Sequence[str], log: Path, folder: Path | None = None) -> None:
        """Start Python with these arguments in a folder; all output is appended to the log."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,  # closes when this process ends; `end_with_parent` waits for that
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # so that Ctrl-C in the terminal does not reach the child,
                creationflags=NEW_GROUP,  # and the same on Windows
            )
        self._children[name] = (process, time.monotonic())

    def seconds(self, name: str) -> float:
        """The seconds since a running child was started."""
        return time.monotonic() - self._children[name][1]

    def ended(self) -> dict[str, Exit]:
        """The children that have ended since the last call, and how."""
        codes = {name: process.poll() for name, (process, _) in self._children.items()}
        return {name: self._remove(name, code) for name, code in codes.items() if code is not None}

    def stop(self) -> None:
        """Terminate all children and wait until they have ended."""
        for process, _ in self._children.values():
            process.terminate()
        for name in self.running:
            self._remove(name, self._children[name][0].wait())

    def _remove(self, name: str, code: int) -> Exit:
        seconds = self.seconds(name)
        process, _ = self._children.pop(name)
        assert process.stdin is not None
        process.stdin.close()
        return Exit(code, seconds)


def end_with_parent() -> None:
    """End this process when its parent ends, even if the parent is killed. Called by a child of `Children`.

    The parent holds the other end of this process's standard input and never writes to it. The system closes it when
    the parent ends, and only then does the read below return.
    """

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)
        os._exit(ORPHANED)

    threading.Thread(target=watch, daemon=True).start()
