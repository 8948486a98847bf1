"""Parts as processes of this machine."""

import os

from relpos.system.executors.interface import Executor, Part, Resources
from relpos.system.processes import Children, Exit


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
        if workers < 1:
            raise ValueError(f"--workers must be at least 1, not {workers}.")
        self.places = workers
        self.threads = Resources(max(1, (os.cpu_count() or 1) // workers) if cores is None else cores).threads
        self._children: Children[str] = Children(self.threads)

    @property
    def running(self) -> list[str]:
        return self._children.running

    def start(self, name: str, part: Part) -> None:
        part.log.parent.mkdir(parents=True, exist_ok=True)
        self._children.start(name, list(map(str, part.command())), part.log)

    def seconds(self, name: str) -> float:
        return self._children.seconds(name)

    def ended(self) -> dict[str, Exit]:
        return self._children.ended()

    def stop(self) -> None:
        self._children.stop()
