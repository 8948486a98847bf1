"""Parts as jobs of SLURM, through submitit."""

import getpass
import importlib
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relpos.system.executors import Exit, Part, Resources
from relpos.system.files import write_text
from relpos.system.node import ClusterExecutor, Job, Task, import_extra, last_words, make_job, run_part

MINUTES = 60  # time limit of a job
RESTARTS = 100  # how often a job that reached its time limit is queued again
RETRIES = 3  # how often a part is submitted again because its job disappeared
FOLDER = ".slurm"  # in the folder that a part writes: submitit's files
SUFFIX = ".job"  # of the file there with the number of a part's job, by which a rerun of the command finds it
CHECK = 15.0  # seconds between two looks at the queue
# Reasons for which SLURM keeps a job in the queue for ever: no machine of the partition is large enough, and the like.
NEVER = {
    *("PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit"),
    *("BadConstraints", "InvalidAccount", "InvalidQOS"),
}
# SLURM ends a job by sending these to all its processes. That is not a result of the part: the job is queued again, or
# ends before it can write one.
ENDING = ("SIGTERM", "SIGUSR2")
GRACE = 180.0  # seconds to wait for that
STOP = 10.0  # seconds to wait for cancelled jobs
GONE = 30.0  # seconds after which a job that is neither in the queue nor has a result is lost


@dataclass(kw_only=True)
class SlurmTask(Task):
    """A part that was submitted; its handle is submitit's job."""

    seen: float  # when it was last in the queue, as time.monotonic counts

    @property
    def number(self) -> str:
        return str(self.handle.job_id)


class SlurmPart:
    """What a job of SLURM calls: it runs the part, and is queued again if the job reaches its time limit."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self) -> Exit:
        for event in run_part(self.job):
            if event.exit is not None:
                if event.exit.code < 0 and signal.Signals(-event.exit.code).name in ENDING:
                    time.sleep(GRACE)
                return event.exit
        folder = self.job.part.writes
        sentence = f"a machine of the cluster does not see {folder}: SLURM needs a folder that all machines share."
        return Exit(1, 0.0, sentence)

    def checkpoint(self) -> Any:
        """Called by submitit before the time limit, and when a job is preempted: the part resumes in a new job."""
        return importlib.import_module("submitit").helpers.DelayedSubmission(self)


class SlurmExecutor(ClusterExecutor[SlurmTask]):
    """Runs parts as jobs of SLURM, one job per part. Needs relpos[slurm], and a folder that all machines share.

    If this process is killed, its jobs keep running; rerun the command to wait for them. A part that does not finish
    within the time limit is queued again and resumes.

    Args:
        resources: What one part needs.
        workers: How many jobs are submitted at a time. Default: all of them.
        partition: SLURM's partition. Default: the cluster's.
        minutes: Time limit of a job. Default: 60.
        options: Other options of sbatch, by name: {"account": "lab"}.
        retries: How often a part is submitted again if its job disappears, as with a machine that fails.
        cluster: "slurm", or "local" to try the jobs as processes of this machine.

    Raises:
        ModuleNotFoundError: submitit is not installed.
        ValueError: This machine has no SLURM.

    Example:
        >>> with relpos.SlurmExecutor(relpos.Resources(cores=8, gpus=1), partition="gpu", minutes=240) as cluster:
        ...     relpos.compare(["alibi", "rope"], executor=cluster, out="/shared/runs/two")
    """

    def __init__(
        self,
        resources: Resources = Resources(),  # noqa: B008 - frozen
        workers: int | None = None,
        partition: str | None = None,
        minutes: int | None = None,
        options: Mapping[str, object] | None = None,
        retries: int = RETRIES,
        cluster: str = "slurm",
    ) -> None:
        super().__init__(resources, workers, retries)
        self._submitit = import_extra("submitit", "slurm")
        if cluster == "slurm" and shutil.which("sbatch") is None:
            raise ValueError("this machine has no SLURM (no command sbatch): run relpos where you submit jobs.")
        self.cluster = cluster
        self._parameters: dict[str, object] = {
            "name": "relpos",
            "nodes": 1,
            "tasks_per_node": 1,
            "cpus_per_task": resources.cores,
            "timeout_min": minutes or MINUTES,
            "slurm_additional_parameters": dict(options or {}),
        }
        if partition is not None:
            self._parameters["slurm_partition"] = partition
        if resources.gpus:
            self._parameters["gpus_per_node"] = resources.gpus
        if resources.memory is not None:
            self._parameters["mem_gb"] = resources.memory / 2**30
        self._checked = 0.0

    def start(self, name: str, part: Part) -> None:
        job = self._earlier(part)
        if job is None:
            job = self._submit(part)
        else:
            self._messages.append(f"{name} is job {job.job_id} of an earlier command: waiting for it")
        self._tasks[name] = SlurmTask(part, job, seen=time.monotonic())

    def ended(self) -> dict[str, Exit]:
        if self._tasks and time.monotonic() - self._checked >= CHECK:
            self._look()
        return super().ended()

    def stop(self) -> None:
        for task in self._tasks.values():
            task.handle.cancel(check=False)
        numbers, limit = [task.number for task in self._tasks.values()], time.monotonic() + STOP
        while numbers and self._queue(numbers) and time.monotonic() < limit:
            time.sleep(0.5)
        for name in self.running:
            self._remove(name)

    def _remove(self, name: str) -> None:
        _number_file(self._tasks[name].part).unlink(missing_ok=True)
        super()._remove(name)

    def _submit(self, part: Part) -> Any:
        folder = part.writes.absolute() / FOLDER
        executor = self._submitit.AutoExecutor(folder, cluster=self.cluster, slurm_max_num_timeout=RESTARTS)
        executor.update_parameters(**self._parameters)
        try:
            job = executor.submit(SlurmPart(make_job(part, self.resources)))
        except (self._submitit.core.utils.FailedJobError, subprocess.CalledProcessError) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])
            raise ValueError(f"SLURM refused a job that needs {self.resources}: {reason}") from None
        write_text(_number_file(part), job.job_id)
        return job

    def _earlier(self, part: Part) -> Any:
        """The job of a part that an earlier command submitted and that has not ended; None if there is none."""
        folder = part.writes.absolute() / FOLDER
        try:
            number = _number_file(part).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        kind = self._submitit.SlurmJob if self.cluster == "slurm" else self._submitit.LocalJob
        return kind(folder, number) if number in self._queue([number]) else None

    def _queue(self, numbers: list[str]) -> dict[str, list[str]]:
        """The state of each job that waits or runs, by number, and the reason for which it waits."""
        if self.cluster != "slurm":
            jobs = {task.number: task.handle for task in self._tasks.values()}
            return {number: ["RUNNING", ""] for number in numbers if _runs(number, jobs.get(number))}
        command = ["squeue", "--noheader", "--user", getpass.getuser(), "--format", "%A|%T|%r"]
        queue = subprocess.run(command, capture_output=True, text=True, check=False)
        if queue.returncode:  # the controller is busy or restarting: nothing is known
            return {number: ["UNKNOWN", ""] for number in numbers}
        states = {line.split("|")[0]: line.split("|")[1:] for line in queue.stdout.splitlines()}
        return {number: states[number] for number in numbers if number in states}

    def _look(self) -> None:
        """Note which jobs are in the queue, and which of them run; refuse to wait for one that never will."""
        self._checked = now = time.monotonic()
        states = self._queue([task.number for task in self._tasks.values()])
        for task in self._tasks.values():
            if task.number not in states:
                continue
            task.seen = now
            state, reason = states[task.number]
            if state == "PENDING" and (reason in NEVER or reason.endswith("PerJobLimit")):
                raise ValueError(
                    f"SLURM will never start a job that needs {self.resources} ({reason}): ask for less, or for "
                    "another partition (--slurm-partition, --slurm-minutes)."
                )
            if state in ("RUNNING", "COMPLETING"):
                task.began = now if task.began is None else task.began
            elif state == "PENDING":
                task.began = None

    def _end(self, name: str, task: SlurmTask) -> Exit | None:
        if task.handle.paths.result_pickle.exists():
            try:
                end: Exit = task.handle.result()
            except Exception as error:  # what the job raised: its traceback
                return Exit(1, 0.0, f"it could not be run by job {task.number}: {last_words(error)}")
            return end
        if self._checked - task.seen < GONE:
            return None
        task.lost += 1
        if task.lost > self.retries:
            failure = f"its jobs disappeared {task.lost} times; the last was {task.number}: see {FOLDER}."
            return Exit(1, task.seconds, failure)
        self._messages.append(
            f"job {task.number} of {name} disappeared. Submitting it again ({task.lost} of {self.retries})"
        )
        task.handle, task.began, task.seen = self._submit(task.part), None, time.monotonic()
        return None


def _number_file(part: Part) -> Path:
    return part.writes / FOLDER / f"{part.log.stem}{SUFFIX}"


def _runs(number: str, job: Any) -> bool:
    """Whether a local job runs; one of an earlier command is known by the number of its process only."""
    if job is not None and job.state in ("RUNNING", "FINISHED", "INTERRUPTED"):
        return bool(job.state == "RUNNING")
    import psutil

    return bool(psutil.pid_exists(int(number)) and psutil.Process(int(number)).status() != psutil.STATUS_ZOMBIE)
