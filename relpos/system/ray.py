"""Parts as tasks of a Ray cluster."""

import contextlib
import importlib
import os
import re
import socket
import time
from dataclasses import dataclass
from typing import Any

from relpos.system.executors import Exit, Part, Resources
from relpos.system.node import (
    PROOF,
    ClusterExecutor,
    Event,
    Job,
    Task,
    bring_back,
    import_extra,
    last_words,
    make_job,
    pack,
    run_part,
)

RUNNING = "auto"  # the cluster that runs on this machine, or that of the variable RAY_ADDRESS
OWN = "local"  # a cluster of this machine alone, for as long as the command runs
ADDRESS = re.compile(r"auto|local|(?P<host>[\w.-]+|\[[\da-fA-F:]+\]):(?P<port>\d+)")
CONNECT = 5.0  # seconds to wait for an answer from the cluster's address
LOCAL_STORE = 256 * 2**20  # bytes of the object store of a cluster of our own: results of parts pass through it
NICENESS = "RAY_worker_niceness"  # Ray's own spelling
RETRIES = 3  # how often a part is started again because its machine was lost
STOP = 10.0  # seconds that parts have to end; then their workers are killed
CHECK = 10.0  # seconds between two looks at the machines of the cluster, if a part waits
PATIENCE = 60.0  # seconds that a part waits for a machine that is large enough: it may be starting again
REASONS = {  # Ray's errors
    "NodeDiedError": "its machine ended or cannot be reached",
    "WorkerCrashedError": "Ray's worker ended",
    "OutOfMemoryError": "its machine ran out of memory",
    "ObjectLostError": "its result was lost with its machine",
}


@dataclass(kw_only=True)
class RayTask(Task):
    """A part that was handed to Ray; its handle is a generator of references to events."""

    job: Job
    files: Any = None  # a reference to what the part reads, once a machine has asked for it
    machine: str = ""


class RayExecutor(ClusterExecutor[RayTask]):
    """Runs parts as tasks of a Ray cluster, on any of its machines. Needs relpos[ray].

    relpos and its requirements must be installed on every machine, in the same versions. A part runs in the user's
    folder if its machine sees that folder, and resumes there if it is started again. Otherwise it runs in a scratch
    folder, and its files are sent back when it ends.

    Args:
        address: Of the cluster, as in "10.0.0.1:6379". "auto": the cluster that runs on this machine, or the one that
            the environment variable RAY_ADDRESS names. "local": start one on this machine for as long as this object
            is open.
        resources: What one part needs.
        workers: How many parts are handed to Ray at a time. Default: all of them; Ray starts those that have a place.
        retries: How often a part is started again if its machine is lost.
        scratch: Run every part in a scratch folder of its machine, even if that machine sees the user's folder.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ValueError: There is no cluster at the address, or none of its machines is large enough for one part.

    Example:
        >>> with relpos.RayExecutor("10.0.0.1:6379", relpos.Resources(cores=4, gpus=1)) as cluster:
        ...     relpos.compare(["alibi", "rope"], executor=cluster, out="/shared/runs/two")
    """

    def __init__(
        self,
        address: str = RUNNING,
        resources: Resources = Resources(),  # noqa: B008 - frozen
        workers: int | None = None,
        retries: int = RETRIES,
        scratch: bool = False,
    ) -> None:
        super().__init__(resources, workers, retries)
        self.scratch = scratch
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anyone
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns about a change to come
        self._ray = import_extra("ray", "ray")
        self._own = not self._ray.is_initialized()
        if self._own:
            _connect(self._ray, address)
        self._enough = self._checked = time.monotonic()  # when a machine was last seen to be large enough, or checked
        self._submit = self._ray.remote(
            num_returns="streaming",
            max_retries=0,  # we count them ourselves, since the user should read about each
            num_cpus=resources.cores,
            num_gpus=resources.gpus,
            memory=resources.memory,
        )(run_part).remote
        try:
            self._check_machines(patience=0.0)
        except ValueError:
            self.close()
            raise

    def start(self, name: str, part: Part) -> None:
        job = make_job(part, self.resources, self.scratch)
        self._tasks[name] = RayTask(part, self._submit(job), job=job)

    def ended(self) -> dict[str, Exit]:
        ended = super().ended()
        if len(self.active) < len(self._tasks) and time.monotonic() - self._checked >= CHECK:
            self._check_machines(PATIENCE)
        return ended

    def stop(self) -> None:
        for force in (False, True):  # first so that processes can end by themselves
            for task in self._tasks.values():
                with contextlib.suppress(self._ray.exceptions.RayError, RuntimeError):  # the cluster may be gone
                    self._ray.cancel(task.handle, force=force)
            limit = time.monotonic() + STOP
            while self._tasks and time.monotonic() < limit:
                for name, task in list(self._tasks.items()):
                    if self._is_over(task):
                        self._remove(name)
                time.sleep(0.05)
        for name in self.running:
            self._remove(name)

    def close(self) -> None:
        self.stop()
        if self._own and self._ray.is_initialized():
            self._ray.shutdown()

    def _next(self, task: RayTask) -> Event | None:
        """The next event of a part, if there is one. Ray's errors are raised."""
        ready, _ = self._ray.wait([task.handle], timeout=0)
        if not ready:
            return None
        event: Event = self._ray.get(next(task.handle))
        return event

    def _is_over(self, task: RayTask) -> bool:
        """Whether a cancelled part has ended."""
        try:
            while self._next(task) is not None:
                pass
        except (StopIteration, self._ray.exceptions.RayError):
            return True
        return False

    def _end(self, name: str, task: RayTask) -> Exit | None:
        try:
            while (event := self._next(task)) is not None:
                self._handle(task, event)
                if event.exit is not None:
                    return event.exit
        except self._ray.exceptions.RayTaskError as error:
            failure = f"it could not be run on {task.machine or 'the cluster'}: {last_words(error)}"
            return Exit(1, task.seconds, failure)
        except StopIteration:
            return self._retry(name, task, "its events stopped")
        except self._ray.exceptions.RayError as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            reason = next((REASONS[kind] for kind in kinds if kind in REASONS), f"{kinds[0]}: {last_words(error)}")
            return self._retry(name, task, reason)
        return None

    def _handle(self, task: RayTask, event: Event) -> None:
        part = task.job.part
        if event.missing:
            if task.files is None:
                paths, without = [*part.reads, part.writes], [part.log, part.writes / PROOF]
                task.files = self._ray.put(pack(task.job.folder, paths, without))
            task.handle = self._submit(task.job, task.files)
            return
        if task.began is None:
            task.machine, task.began = event.machine, time.monotonic()
        if event.log:
            with task.part.log.open("ab") as log:
                log.write(event.log)
        if event.files is not None:
            bring_back(event.files, part.writes)

    def _retry(self, name: str, task: RayTask, reason: str) -> Exit | None:
        """Start a part again whose machine was lost, unless that has happened too often."""
        task.lost += 1
        machine = f" on {task.machine}" if task.machine else ""
        if task.lost > self.retries:
            return Exit(1, task.seconds, f"it was lost {task.lost} times{machine}: {reason}.")
        self._messages.append(f"{name} was lost{machine}: {reason}. Starting it again ({task.lost} of {self.retries})")
        task.began, task.machine = None, ""
        task.handle = self._submit(task.job, *([] if task.files is None else [task.files]))
        return None

    def _check_machines(self, patience: float) -> None:
        """Refuse to wait for a machine that the cluster does not have."""
        self._checked = now = time.monotonic()
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        machines = [
            Resources(int(node["CPU"]), int(node.get("memory", 0)) or None, int(node.get("GPU", 0)))
            for node in nodes
            if node.get("CPU", 0) >= 1
        ]
        if any(machine.include(self.resources) for machine in machines):
            self._enough = now
        elif now - self._enough >= patience:
            raise ValueError(
                f"no machine of the Ray cluster has what one part needs, {self.resources}: its machines have "
                f"{'; '.join(map(str, machines)) or 'nothing'}. Ask for less, or add a machine to the cluster."
            )


# -- The connection: what Ray itself would wait for without end is refused in a sentence


def _connect(ray: Any, address: str) -> None:
    """Connect this process with a cluster (HOST:PORT or "auto"), or start one ("local")."""
    if address.startswith("ray://"):
        raise ValueError(
            f"relpos does not go through Ray's client ({address}): run the command on a machine of the cluster, with "
            "--ray alone."
        )
    place = address if address != RUNNING else os.environ.get("RAY_ADDRESS", RUNNING)
    match = ADDRESS.fullmatch(place)
    if match is None:
        raise ValueError(f"{place!r} is not the address of a Ray cluster: it looks like 10.0.0.1:6379.")
    if match["host"]:
        _check_answer(match["host"].strip("[]"), int(match["port"]), place)  # ray.init would wait for ever
    # Ray prints the log of a machine that was lost, and has no option against it; a line of ours says that it was.
    worker: Any = importlib.import_module("ray._private.worker")
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *args, **kwargs: None
    if place == OWN:
        os.environ.setdefault(NICENESS, "0")  # else Ray's workers yield to every other process
    own = {"include_dashboard": False, "object_store_memory": LOCAL_STORE} if place == OWN else {}
    try:
        ray.init(address=place, logging_level="ERROR", log_to_driver=False, **own)
    except ConnectionError:
        raise ValueError(
            "no Ray cluster runs on this machine: start one with ray start --head, give the address of one "
            "(--ray 10.0.0.1:6379), or start one for this command alone (--ray local)."
        ) from None


def _check_answer(host: str, port: int, address: str) -> None:
    try:
        socket.create_connection((host, port), timeout=CONNECT).close()
    except OSError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"no Ray cluster answers at {address} ({reason}): `ray status` on one of its machines prints the address."
        ) from None
