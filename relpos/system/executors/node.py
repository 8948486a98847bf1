"""A part on a machine of a cluster: in the folder of the user if the machine sees it, else in a scratch folder.

Both Ray and SLURM call `run_part` there. It starts the part's process and reports events; the process ends when the
caller ends, however that happens.
"""

import io
import os
import platform
import shutil
import tarfile
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from relpos.system.executors.interface import Part, Resources
from relpos.system.files import write_text
from relpos.system.processes import Children, Exit

PROOF = ".shared"  # in the folder that a part writes: a machine that reads our token there sees the same folder
TOKEN = uuid.uuid4().hex  # one per process of the user, since several parts may write the same folder
POLL = 0.2  # seconds between two looks at the process
SEND = 2.0  # seconds between two pieces of a log


@dataclass(frozen=True)
class Job:
    """A part with everything that another machine must know to run it.

    Attributes:
        command: The arguments of the Python interpreter; paths are `Path`.
        folder: The user's current folder: relative paths start there.
        writes: The folder that the part writes.
        log: The file in it to which the output is appended.
        reads: Files and folders that it reads.
        token: What the file `PROOF` in `writes` contains.
        threads: The number of threads.
        scratch: Run in a scratch folder, even if the user's folder is visible.
    """

    command: tuple[str | Path, ...]
    folder: Path
    writes: Path
    log: Path
    reads: tuple[Path, ...]
    token: str
    threads: int
    scratch: bool = False


@dataclass(frozen=True)
class Began:
    """The part's process has started."""

    machine: str


@dataclass(frozen=True)
class Missing:
    """The machine does not see the user's folder, and received no files: nothing was run."""

    machine: str


@dataclass(frozen=True)
class Lines:
    """The next piece of the log of a part in a scratch folder."""

    text: bytes


@dataclass(frozen=True)
class Ended:
    """The part's process has ended; of a scratch folder, the files that it left come back."""

    exit: Exit
    files: bytes | None


Event = Began | Missing | Lines | Ended


def make_job(part: Part, resources: Resources, scratch: bool = False) -> Job:
    """Prepare a part for another machine: create its folder, its log, and the proof that a machine sees them."""

    def plain(path: Path) -> Path:
        return path.resolve() if ".." in path.parts else path

    part.writes.mkdir(parents=True, exist_ok=True)
    part.log.touch()
    write_text(part.writes / PROOF, TOKEN)
    return Job(
        tuple(plain(word) if isinstance(word, Path) else word for word in part.command(resources.gpus)),
        Path.cwd(),
        plain(part.writes),
        plain(part.log),
        tuple(plain(path) for path in part.reads if path.exists()),
        TOKEN,
        resources.threads,
        scratch,
    )


def run_part(job: Job, files: bytes | None = None) -> Iterator[Event]:
    """Run a part on this machine.

    Args:
        job: The part.
        files: What it reads, as `pack` packs it, for a machine that does not see the user's folder.

    Yields:
        `Missing`, or `Began`, then pieces of the log (of a scratch folder only), and `Ended`.
    """
    if not job.scratch and _visible(job):
        yield from _run(job, job.folder, scratch=False)
    elif files is None:
        yield Missing(platform.node())
    else:
        with tempfile.TemporaryDirectory(prefix="relpos-") as folder:
            unpack(files, Path(folder))
            yield from _run(job, Path(folder), scratch=True)


def _visible(job: Job) -> bool:
    """Whether this machine sees the folders of the user."""
    try:
        proof = (job.folder / job.writes / PROOF).read_text(encoding="utf-8")
    except OSError:
        return False
    return proof == job.token and all((job.folder / path).exists() for path in job.reads)


def _run(job: Job, folder: Path, scratch: bool) -> Iterator[Event]:
    def here(path: Path) -> Path:
        return inside(path) if scratch else path

    command = [str(here(word)) if isinstance(word, Path) else word for word in job.command]
    log = folder / here(job.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    before = _states(folder / here(job.writes)) if scratch else {}
    children: Children[str] = Children(job.threads)
    children.start("part", command, log, folder if folder.is_dir() else Path(tempfile.gettempdir()))
    sent, last = 0, time.monotonic()
    try:
        yield Began(platform.node())
        while not (ended := children.ended()):
            time.sleep(POLL)
            if scratch and time.monotonic() - last >= SEND:
                last = time.monotonic()
                text = _after(log, sent)
                sent += len(text)
                if text:
                    yield Lines(text)
    finally:
        children.stop()
    if not scratch:
        yield Ended(ended["part"], None)
        return
    yield Lines(_after(log, sent))
    now = _states(folder / here(job.writes))
    same = [file for file, state in before.items() if now.get(file) == state]  # other parts may have changed these
    yield Ended(ended["part"], pack(folder, [here(job.writes)], without=[log, *same]))


def _after(log: Path, start: int) -> bytes:
    with log.open("rb") as file:
        file.seek(start)
        return file.read()


# -- Files that travel between the user's folder and the scratch folder of another machine


def inside(path: Path) -> Path:
    """The same path below a scratch folder: a relative one stays, /home/me/run becomes home/me/run."""
    return path.relative_to(path.anchor) if path.is_absolute() else path


def pack(folder: Path, paths: Iterable[Path], without: Iterable[Path] = ()) -> bytes:
    """Pack files and folders, each under the path that `inside` gives it.

    Args:
        folder: Relative paths start there.
        paths: What to pack; what does not exist is left out.
        without: Files to leave out.

    Returns:
        A tar file.
    """
    left_out = {folder / path for path in without}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in paths:
            source = folder / path
            files = sorted(source.rglob("*")) if source.is_dir() else [source] if source.exists() else []
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
    """Write the files of a folder that was packed on another machine into the user's folder.

    The files are complete when they appear, the oldest first: a record that was written last appears last.

    Args:
        files: The folder `path`, as `pack` packs it.
        path: The folder on this machine.
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
