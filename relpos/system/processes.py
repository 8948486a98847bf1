"""Child processes: started with a fixed number of threads, watched, stopped together, and never left behind."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
ORPHANED = 65  # exit code of a child whose parent has ended; nobody is left to read it
NEW_GROUP: int = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # Windows only
READ = 4096  # bytes read from the end of a child's standard error


@dataclass(frozen=True)
class Exit:
    """How a child process ended.

    Attributes:
        code: The exit code; a negative value is the number of the signal that ended the process (not on Windows).
        seconds: How long the process ran.
        last_line: The last line of its standard error; empty for a child that writes to a log.
        failure: Why it did not run to its end, in a sentence, where its process cannot say so: its machine was lost.
    """

    code: int
    seconds: float
    last_line: str
    failure: str | None = None

    def reason(self, details: str | None = None) -> str:
        """Describe in a sentence why the process ended.

        Args:
            details: What to print after the exit code; the last line of standard error by default.
        """
        if self.failure is not None:
            return self.failure
        if self.code < 0:
            name = signal.Signals(-self.code).name
            memory = ", as the system does when memory runs out" if name == "SIGKILL" else ""
            return f"its process was ended by {name}{memory}."
        return f"its process ended with code {self.code}: {self.last_line if details is None else details}"


@dataclass(frozen=True)
class _Child:
    process: subprocess.Popen[bytes]
    started: float  # seconds, as time.monotonic counts them
    errors: IO[bytes] | None  # its standard error, if that is captured


class Children(Generic[Key]):
    """The child processes of this process, by key.

    A child must call `end_with_parent` when it starts. Ctrl-C reaches this process only, which then calls `stop`.

    Args:
        threads: The number of threads of each child (OMP_NUM_THREADS).

    Example:
        >>> children = Children[str](threads=1)
        >>> children.start("a", ["-m", "my_package.work"])
        >>> while children.running:
        ...     for key, end in children.ended().items():
        ...         print(key, end.code, end.reason())
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._children: dict[Key, _Child] = {}

    @property
    def running(self) -> list[Key]:
        """The keys of the children that have not been reported by `ended`, in the order in which they started."""
        return list(self._children)

    def start(self, key: Key, arguments: Sequence[str], log: Path | None = None, folder: Path | None = None) -> None:
        """Start a Python process.

        Args:
            key: The name of the child in `running` and `ended`.
            arguments: The arguments of the Python interpreter, for example ["-m", "package.module", "3"].
            log: The file to which standard output and standard error are appended. Without it standard output is
                discarded, and the last line of standard error is in the child's `Exit`.
            folder: The current folder of the child. Default: that of this process.
        """
        errors = tempfile.TemporaryFile() if log is None else None  # noqa: SIM115 - closed when the child has ended
        with (Path(os.devnull) if log is None else log).open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,  # closes when this process ends; `end_with_parent` waits for that
                stdout=output,
                stderr=errors or subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # so that Ctrl-C in the terminal does not reach the child,
                creationflags=NEW_GROUP,  # and the same on Windows
            )
        self._children[key] = _Child(process, time.monotonic(), errors)

    def seconds(self, key: Key) -> float:
        """The seconds since a running child started."""
        return time.monotonic() - self._children[key].started

    def ended(self) -> dict[Key, Exit]:
        """The children that have ended since the last call, and how."""
        codes = {key: child.process.poll() for key, child in self._children.items()}
        return {key: self._remove(key, code) for key, code in codes.items() if code is not None}

    def stop(self) -> None:
        """Terminate all children and wait until they have ended."""
        for child in self._children.values():
            child.process.terminate()
        for key in self.running:
            self._remove(key, self._children[key].process.wait())

    def _remove(self, key: Key, code: int) -> Exit:
        child = self._children.pop(key)
        assert child.process.stdin is not None
        child.process.stdin.close()
        last_line = ""
        if child.errors is not None:
            with child.errors as errors:
                errors.seek(max(0, errors.seek(0, os.SEEK_END) - READ))
                lines = errors.read().decode(errors="replace").strip().splitlines()
            last_line = lines[-1] if lines else ""
        return Exit(code, time.monotonic() - child.started, last_line)


def end_with_parent() -> None:
    """End this process when its parent ends, even if the parent is killed. Called by a child of `Children`.

    The parent holds the other end of this process's standard input and never writes to it. The system closes it when
    the parent ends, and only then does the read below return.
    """

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)
        os._exit(ORPHANED)

    threading.Thread(target=watch, daemon=True).start()
