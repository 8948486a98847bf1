"""A part on a machine of a cluster: in the folder of the user if the machine sees it, else in a scratch folder.

Both Ray and SLURM call `run_part` there. It starts the part's process and reports events; the process ends when the
caller ends, however that happens.
"""

import importlib
import io
import os
import platform
import shutil
import tarfile
import tempfile
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from relpos.system.executors import Executor, Exit, LocalExecutor, Part, Resources, check_workers
from relpos.system.files import write_text

PROOF = ".shared"  # in the folder that a part writes: a machine that reads our token there sees the same folder
TOKEN = uuid.uuid4().hex  # one per process of the user, since several parts may write the same folder
POLL = 0.2  # seconds between two looks at the process
SEND = 2.0  # seconds between two pieces of a log


# -- On the machine of the user


@dataclass
class Task:
    """A part that was handed to the cluster."""

    part: Part
    handle: Any  # Ray's or submitit's
    began: float | None = None  # as time.monotonic counts; None while it waits for a place
    lost: int = 0  # how often its machine was lost

    @property
    def seconds(self) -> float:
        return 0.0 if self.began is None else time.monotonic() - self.began


AnyTask = TypeVar("AnyTask", bound=Task)


class ClusterExecutor(Executor, Generic[AnyTask]):
    """What the executors of clusters share: the list of their tasks."""

    def __init__(self, resources: Resources, workers: int | None, retries: int) -> None:
        check_workers(workers)
        self.resources, self.places, self.retries = resources, workers, retries
        self.threads = resources.threads
        self._tasks: dict[str, AnyTask] = {}
        self._messages: list[str] = []

    @property
    def running(self) -> list[str]:
        return list(self._tasks)

    @property
    def active(self) -> list[str]:
        return [name for name, task in self._tasks.items() if task.began is not None]

    def seconds(self, name: str) -> float:
        return self._tasks[name].seconds

    def ended(self) -> dict[str, Exit]:
        exits = {name: self._end(name, task) for name, task in self._tasks.items()}
        ended = {name: end for name, end in exits.items() if end is not None}
        for name in ended:
            self._remove(name)
        return ended

    @abstractmethod
    def _end(self, name: str, task: AnyTask) -> Exit | None:
        """How a part has ended; None if it has not."""

    def messages(self) -> list[str]:
        messages, self._messages = self._messages, []
        return messages

    def _remove(self, name: str) -> None:
        folder = self._tasks.pop(name).part.writes
        if all(task.part.writes != folder for task in self._tasks.values()):
            (folder / PROOF).unlink(missing_ok=True)


def import_extra(name: str, extra: str) -> Any:
    """A package that an extra of relpos installs."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModuleNotFoundError(f"--{extra} needs {name}: pip install 'relpos[{extra}]'", name=name) from None


def last_words(error: Exception) -> str:
    """The last line of an error's message, or the name of its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


@dataclass(frozen=True)
class Job:
    """A part with everything that another machine must know to run it."""

    part: Part
    resources: Resources
    folder: Path  # the user's current folder: relative paths start there
    scratch: bool  # whether it runs in a scratch folder even if the user's folder is visible
    token: str = TOKEN  # what the file PROOF in the part's folder contains


def make_job(part: Part, resources: Resources, scratch: bool = False) -> Job:
    """Prepare a part for another machine: create its folder, its log, and the proof that a machine sees them."""
    part.writes.mkdir(parents=True, exist_ok=True)
    part.log.touch()
    write_text(part.writes / PROOF, TOKEN)
    reads = tuple(_plain(path) for path in part.reads if path.exists())
    arguments = tuple(_plain(word) if isinstance(word, Path) else word for word in part.arguments)
    part = replace(part, arguments=arguments, writes=_plain(part.writes), log=_plain(part.log), reads=reads)
    return Job(part, resources, Path.cwd(), scratch)


def _plain(path: Path) -> Path:
    return path.resolve() if ".." in path.parts else path


# -- On the machine of the part


class Event(NamedTuple):
    """What a machine reports of a part: that it has begun, the next piece of its log, its end."""

    machine: str
    missing: bool = False  # it does not see the user's folder, and received no files: nothing was run
    log: bytes = b""  # of a part in a scratch folder
    exit: Exit | None = None
    files: bytes | None = None  # at the end, what the part left in a scratch folder


def run_part(job: Job, files: bytes | None = None) -> Iterator[Event]:
    """Run a part on this machine; `files` is what it reads, packed, for one that does not see the user's folder."""
    if not job.scratch and _is_visible(job):
        yield from _run(job, job.folder, scratch=False)
    elif files is None:
        yield Event(platform.node(), missing=True)
    else:
        with tempfile.TemporaryDirectory(prefix="relpos-") as folder:
            unpack(files, Path(folder))
            yield from _run(job, Path(folder), scratch=True)


def _is_visible(job: Job) -> bool:
    try:
        proof = (job.folder / job.part.writes / PROOF).read_text(encoding="utf-8")
    except OSError:
        return False
    return proof == job.token and all((job.folder / path).exists() for path in job.part.reads)


def _run(job: Job, folder: Path, scratch: bool) -> Iterator[Event]:
    def here(path: Path) -> Path:
        return inside(path) if scratch else path

    arguments = tuple(here(word) if isinstance(word, Path) else word for word in job.part.arguments)
    part = replace(job.part, arguments=arguments, log=here(job.part.log), writes=here(job.part.writes))
    machine, log = platform.node(), folder / part.log
    before = _states(folder / part.writes) if scratch else {}
    executor = LocalExecutor(cores=job.resources.threads)
    executor.start("part", part, job.resources.gpus, folder if folder.is_dir() else Path(tempfile.gettempdir()))
    sent, last = 0, time.monotonic()
    try:
        yield Event(machine)
        while not (ended := executor.ended()):
            time.sleep(POLL)
            if scratch and time.monotonic() - last >= SEND:
                last = time.monotonic()
                if text := _after(log, sent):
                    sent += len(text)
                    yield Event(machine, log=text)
    finally:
        executor.stop()
    if scratch:
        now = _states(folder / part.writes)
        same = [file for file, state in before.items() if now.get(file) == state]  # other parts may have changed these
        files = pack(folder, [part.writes], without=[log, *same])
        yield Event(machine, log=_after(log, sent), exit=ended["part"], files=files)
    else:
        yield Event(machine, exit=ended["part"])


def _after(log: Path, start: int) -> bytes:
    with log.open("rb") as file:
        file.seek(start)
        return file.read()


# -- Files that travel between the user's folder and the scratch folder of another machine


def inside(path: Path) -> Path:
    """The same path below a scratch folder: a relative one stays, /home/me/run becomes home/me/run."""
    return path.relative_to(path.anchor) if path.is_absolute() else path


def pack(folder: Path, paths: Iterable[Path], without: Iterable[Path] = ()) -> bytes:
    """Pack files and folders below a folder into a tar file, each under the path that `inside` gives it."""
    left_out = {folder / path for path in without}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in paths:
            source = folder / path
            files = sorted(source.rglob("*")) if source.is_dir() else [source]
            for file in files:
                if file.is_file() and file not in left_out:
                    archive.add(file, str(inside(path) / file.relative_to(source)), recursive=False)
    return buffer.getvalue()


def _states(folder: Path) -> dict[Path, tuple[int, int]]:
    """When each file of a folder was written, and its size: a file that is written again gets a new state."""
    files = {file: file.stat() for file in folder.rglob("*") if file.is_file()}
    return {file: (state.st_mtime_ns, state.st_size) for file, state in files.items()}


def unpack(files: bytes, folder: Path) -> None:
    """Unpack into a folder what `pack` packed."""
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        archive.extractall(folder, filter="data")


def bring_back(files: bytes, path: Path) -> None:
    """Write the files of the folder `path`, packed on another machine, into the user's folder.

    The files are complete when they appear, the oldest first: a record that was written last appears last.
    """
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".returned-", dir=path) as temporary:
        unpack(files, Path(temporary))
        source = Path(temporary) / inside(path)
        returned = [file for file in source.rglob("*") if file.is_file()]
        for file in sorted(returned, key=lambda file: file.stat().st_mtime_ns):
            target = path / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(file, target)
