"""Executors run the parts of a large job: processes of this machine here, Ray and SLURM beside it; and the scheduler.

A part is a Python process that reads files and writes one folder. What it computes does not depend on where it runs.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

from relpos.system.progress import LiveLine

MODULE = "torch.distributed.run"  # starts one process per GPU, as torchrun does
POLL = 0.2  # seconds between two looks at the parts
EVERY = 15.0  # seconds between two lines of progress outside a terminal
READ = 4096  # bytes read from the end of a log
ORPHANED = 65  # exit code of a process whose parent has ended; nobody is left to read it
NEW_GROUP: int = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # Windows only


@dataclass(frozen=True)
class Resources:
    """What one part needs.

    Attributes:
        cores: CPU cores; also the number of its threads, which decides the order in which sums are added.
        memory: Bytes of main memory; None if it is not limited.
        gpus: GPUs. With more than one, a training has one process per GPU.

    Raises:
        ValueError: A number is too small.

    Example:
        >>> relpos.Resources(cores=4, memory=8 * 2**30, gpus=1)
    """

    cores: int = 1
    memory: int | None = None
    gpus: int = 0

    def __post_init__(self) -> None:
        if self.cores < 1:
            raise ValueError(f"a part needs at least 1 core, not {self.cores}.")
        if self.memory is not None and self.memory < 1:
            raise ValueError(f"the memory of a part must be positive, not {self.memory} bytes.")
        if self.gpus < 0:
            raise ValueError(f"the number of GPUs of a part must be 0 or more, not {self.gpus}.")

    def __str__(self) -> str:
        memory = [] if self.memory is None else [f"{self.memory / 2**30:.3g} GB of memory"]
        gpus = [_count(self.gpus, "GPU")] if self.gpus else []
        return ", ".join([_count(self.cores, "core"), *memory, *gpus])

    def include(self, other: "Resources") -> bool:
        """Whether these are enough for others."""
        memory = other.memory is None or (self.memory or 0) >= other.memory
        return memory and self.cores >= other.cores and self.gpus >= other.gpus

    @property
    def threads(self) -> int:
        """The threads of each process: the cores are divided among the processes of a part."""
        return max(1, self.cores // max(1, self.gpus))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(frozen=True)
class Part:
    """One piece of work."""

    module: str  # as in python -m MODULE
    arguments: tuple[str | Path, ...]  # paths are `Path`: they differ on a machine that does not see our folders
    writes: Path  # the folder that it writes
    log: Path  # the file in that folder to which its output is appended
    reads: tuple[Path, ...] = ()  # files and folders; those that do not exist are left out
    distributed: bool = False  # whether several GPUs have one process each; otherwise there is a single process

    def command(self, gpus: int = 0) -> tuple[str | Path, ...]:
        several = self.distributed and gpus > 1
        launcher = ("-m", MODULE, "--standalone", "--nproc-per-node", str(gpus)) if several else ()
        return (*launcher, "-m", self.module, *self.arguments)


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


class Executor(ABC):
    """Runs parts, each under a name. A context manager: leaving it stops what still runs."""

    threads: int = 1  # of each process of a part
    places: int | None = None  # how many parts may be started before others have ended; None if there is no limit
    # Whether it must be the only one that works in a folder. Processes of one machine share a folder by locks; on a
    # cluster, one process of the user starts all parts.
    exclusive = True

    @property
    @abstractmethod
    def running(self) -> list[str]:
        """The parts that were started and have not been reported by `ended`, in the order in which they were."""

    @property
    def active(self) -> list[str]:
        """Those of `running` that have a place; the others wait for one."""
        return self.running

    @abstractmethod
    def start(self, name: str, part: Part) -> None:
        """Start a part, or hand it to the cluster, which starts it when there is a place."""

    @abstractmethod
    def seconds(self, name: str) -> float:
        """The seconds since a part of `active` began."""

    @abstractmethod
    def ended(self) -> dict[str, Exit]:
        """The parts that have ended since the last call, and how. A ValueError: no machine can ever run them."""

    @abstractmethod
    def stop(self) -> None:
        """Stop all parts; what they have written stays."""

    def messages(self) -> list[str]:
        """Lines for the user since the last call, for example about a lost machine."""
        return []

    def close(self) -> None:
        """Stop all parts and leave the cluster."""
        self.stop()

    def __enter__(self) -> "Executor":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LocalExecutor(Executor):
    """Runs parts as processes of this machine.

    Args:
        workers: How many run at the same time.
        cores: The threads of each. Default: the cores of this machine, divided among the workers.

    Raises:
        ValueError: `workers` or `cores` is less than 1.

    Example:
        >>> relpos.compare(["alibi", "rope"], executor=relpos.LocalExecutor(workers=2, cores=1), out="runs/two")
    """

    exclusive = False

    def __init__(self, workers: int = 1, cores: int | None = None) -> None:
        check_workers(workers)
        self.places = workers
        self.threads = Resources(max(1, (os.cpu_count() or 1) // workers) if cores is None else cores).threads
        self._processes: dict[str, tuple[subprocess.Popen[bytes], float]] = {}  # and when each was started

    @property
    def running(self) -> list[str]:
        return list(self._processes)

    def start(self, name: str, part: Part, gpus: int = 0, folder: Path | None = None) -> None:
        """Start a part in a folder. Ctrl-C does not reach it, only this process, which stops it."""
        log = part.log if folder is None else folder / part.log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *map(str, part.command(gpus))],
                stdin=subprocess.PIPE,  # closes when this process ends; `end_with_parent` waits for that
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # so that Ctrl-C in the terminal does not reach the process,
                creationflags=NEW_GROUP,  # and the same on Windows
            )
        self._processes[name] = (process, time.monotonic())

    def seconds(self, name: str) -> float:
        return time.monotonic() - self._processes[name][1]

    def ended(self) -> dict[str, Exit]:
        codes = {name: process.poll() for name, (process, _) in self._processes.items()}
        return {name: self._remove(name, code) for name, code in codes.items() if code is not None}

    def stop(self) -> None:
        for process, _ in self._processes.values():
            process.terminate()
        for name in self.running:
            self._remove(name, self._processes[name][0].wait())

    def _remove(self, name: str, code: int) -> Exit:
        seconds = self.seconds(name)
        process, _ = self._processes.pop(name)
        assert process.stdin is not None
        process.stdin.close()
        return Exit(code, seconds)


def end_with_parent() -> None:
    """End this process when its parent ends, even if the parent is killed. Called by every part.

    The parent holds the other end of this process's standard input and never writes to it. The system closes it when
    the parent ends, and only then does the read below return.
    """

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)
        os._exit(ORPHANED)

    threading.Thread(target=watch, daemon=True).start()


def leave_group() -> None:
    """Leave the other processes of torchrun, if there are any: the last call of a process on CPUs.

    Threads of Gloo that outlive Python may abort the process (pytorch#179291). NCCL could wait for the others.
    """
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


def check_workers(workers: int | None) -> None:
    """Refuse fewer than one part at a time."""
    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be at least 1, not {workers}.")


class Parts:
    """Runs parts that do not depend on each other over an executor, with one line of progress. Here: each part once."""

    def __init__(self, executor: Executor, parts: Mapping[str, Part], say: Callable[[str], object]) -> None:
        self.executor, self.parts, self.say = executor, parts, say
        self.ends: dict[str, Exit] = {}

    def run(self, every: float = EVERY) -> Generator[tuple[str, Exit]]:
        """Start parts as places become free; yields each when it ends. Closing the generator stops those that run."""
        executor, line = self.executor, LiveLine(sys.stderr, every, first=every)
        with contextlib.ExitStack() as ending:
            ending.callback(executor.stop)  # what the parts have written stays
            ending.callback(line.clear)
            while True:
                for name, end in executor.ended().items():
                    line.clear()
                    self.ends[name] = end
                    yield name, end
                for message in executor.messages():
                    line.clear()
                    self.say(message)
                if self._has_room():  # else not asked: what is ready may have to be read from many files
                    for name, part in self.ready().items():
                        if name not in executor.running:
                            executor.start(name, part)
                        if not self._has_room():
                            break
                if not executor.running and not self.waits():
                    return
                line(self.progress)
                time.sleep(POLL)

    def _has_room(self) -> bool:
        return self.executor.places is None or len(self.executor.running) < self.executor.places

    def ready(self) -> Mapping[str, Part]:
        """The parts that may be started now, by name, in order; those that run may be among them."""
        return {name: part for name, part in self.parts.items() if name not in self.ends}

    def waits(self) -> bool:
        """Whether parts will become ready although none runs now."""
        return False

    def progress(self) -> str:
        logs = {name: part.log for name, part in self.parts.items()}
        return "  |  ".join([f"{len(self.ends)} of {len(self.parts)} parts", *self.active_words(logs)])

    def active_words(self, logs: Mapping[str, Path]) -> list[str]:
        """What the running parts do, by the last lines of their logs, and how many wait for a place."""
        running, active = self.executor.running, self.executor.active
        words = [f"{name}: {'  '.join(last_line(logs[name]).split('  ')[:2])[:60]}" for name in active]
        return [*words, f"{len(running) - len(active)} waiting for a place"] if len(running) > len(active) else words


def last_line(log: Path) -> str:
    """The last line in a log; "starting" while the log is empty."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - READ))
        lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "starting")
