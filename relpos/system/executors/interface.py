"""What every executor does: start the parts of a job, notice which have ended and how, and stop the others.

A part is a Python process that reads files and writes one folder. What it computes does not depend on where it runs.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from relpos.system.processes import Exit

MODULE = "torch.distributed.run"  # starts one process per GPU, as torchrun does


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
        words = [_count(self.cores, "core")]
        if self.memory is not None:
            words.append(f"{self.memory / 2**30:.3g} GB of memory")
        if self.gpus:
            words.append(_count(self.gpus, "GPU"))
        return ", ".join(words)

    @property
    def threads(self) -> int:
        """The threads of each process: the cores are divided among the processes of a part."""
        return max(1, self.cores // max(1, self.gpus))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(frozen=True)
class Part:
    """One piece of work.

    Attributes:
        module: The Python module to run, as in python -m MODULE.
        arguments: Its arguments. Paths are given as `Path`: they differ on a machine that does not see the folders of
            this one.
        writes: The folder that it writes.
        log: The file in that folder to which its output is appended.
        reads: Files and folders that it reads; those that do not exist are left out.
        distributed: Whether several GPUs have one process each. Otherwise there is always a single process.
    """

    module: str
    arguments: tuple[str | Path, ...]
    writes: Path
    log: Path
    reads: tuple[Path, ...] = ()
    distributed: bool = False

    def command(self, gpus: int = 0) -> tuple[str | Path, ...]:
        """The arguments of the Python interpreter, with `gpus` GPUs."""
        several = self.distributed and gpus > 1
        launcher = ("-m", MODULE, "--standalone", "--nproc-per-node", str(gpus)) if several else ()
        return (*launcher, "-m", self.module, *self.arguments)


class Executor(ABC):
    """Runs parts, each under a name. A context manager: leaving it stops what still runs.

    Attributes:
        threads: The number of threads of each process of a part.
        places: How many parts may be started before others have ended; None if there is no limit.
        exclusive: Whether it must be the only one that works in a folder. Processes of one machine share a folder by
            locks; on a cluster, one process of the user starts all parts.
    """

    threads: int = 1
    places: int | None = None
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
        """The parts that have ended since the last call, and how.

        Raises:
            ValueError: No part can ever run, because no machine is large enough.
        """

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
