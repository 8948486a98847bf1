"""Options that say where the parts of a command run: processes of this machine, a Ray cluster, or SLURM."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relpos.cli.from_options import Command
from relpos.system.options import COUNT, NOT_NEGATIVE, option

if TYPE_CHECKING:
    from relpos.system.executors import Executor

PANEL = "Where the parts run (docs/scale.md)"  # group of these options in the help
UNITS = {"KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
ADDRESS = re.compile(r"auto|local|ray://.*|[\w.-]+:\d+|\[[\da-fA-F:]+\]:\d+")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Where the parts of a command run."""

    workers: int | None = option(
        None,
        "Parts at a time. Those of this machine divide its cores among them.",
        shown="1; on a cluster as many as have a place",
        range=COUNT,
        panel=PANEL,
    )
    cores: int | None = option(
        None,
        "Cores of each part, and its threads: the same number gives the same result to the bit.",
        shown="cores ÷ workers; 1 on a cluster",
        range=COUNT,
        panel=PANEL,
    )
    memory: str | None = option(None, "Memory of each part on a cluster, as in 8GB.", metavar="SIZE", panel=PANEL)
    gpus: int | None = option(
        None,
        "GPUs of each part on a cluster. With several, it is trained by one process per GPU.",
        shown="0",
        range=NOT_NEGATIVE,
        panel=PANEL,
    )
    ray: str | None = option(
        None,
        "Run the parts on a Ray cluster: the one of this machine or of RAY_ADDRESS, the one at an address such as "
        "10.0.0.1:6379, or with local one that lasts as long as the command.",
        metavar="[ADDRESS]",
        panel=PANEL,
    )
    slurm: bool = option(False, "Run the parts as jobs of SLURM.", panel=PANEL)
    slurm_partition: str | None = option(None, "Partition of the jobs of SLURM.", metavar="NAME", panel=PANEL)
    slurm_minutes: int | None = option(
        None, "Time limit of each job of SLURM, in minutes.", shown="60", range=COUNT, panel=PANEL
    )
    slurm_option: Mapping[str, Any] | None = option(
        None, "Any other option of sbatch, as in account=lab.", metavar="KEY=VALUE", panel=PANEL
    )


class ClusterCommand(Command):
    """A command whose option --ray may stand without an address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Fill in the address where it is left out, before the options are parsed."""
        return super().parse_args(ctx, with_address(args))


def with_address(arguments: list[str]) -> list[str]:
    """The arguments of a command with the address auto where --ray has none.

    The next argument is an address only if it looks like one: it may also be a setting or the folder of a run. An empty
    one is an address too, which the command then refuses.
    """
    result = list(arguments)
    for place, word in enumerate(arguments):
        following = arguments[place + 1 : place + 2]
        if word == "--ray" and not (following and (not following[0].strip() or ADDRESS.fullmatch(following[0]))):
            result[place] = "--ray=auto"
    return result


def parse_memory(text: str) -> int:
    """A size in bytes: 8GB, 512MB, or a number of bytes.

    Raises:
        ValueError: Not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)?", text.strip().upper())
    if match is None or not float(match[1]):
        raise ValueError(f"--memory takes a size such as 8GB or 512MB, not {text!r}.")
    return int(float(match[1]) * UNITS.get(match[2] or "", 1))


def make_executor(options: ClusterOptions, default_workers: int | None = None) -> "Executor | None":
    """The executor that the options describe.

    Args:
        options: The options.
        default_workers: Processes of this machine if no option is given; None to run in this process.

    Raises:
        ValueError: Options contradict each other, or there is no such cluster.
        ModuleNotFoundError: The extra that a cluster needs is not installed.
    """
    from relpos.system.executors import Resources

    memory, gpus, workers = options.memory, options.gpus, options.workers
    of_slurm = (options.slurm_partition, options.slurm_minutes, options.slurm_option)
    if options.ray is not None and options.slurm:
        raise ValueError("give --ray or --slurm, not both.")
    if not options.slurm and of_slurm != (None, None, None):
        raise ValueError("--slurm-partition, --slurm-minutes and --slurm-option go with --slurm.")
    resources = Resources(options.cores or 1, None if memory is None else parse_memory(memory), gpus or 0)
    if options.ray is not None:
        from relpos.system.ray import RayExecutor

        return RayExecutor(options.ray, resources, workers)
    if options.slurm:
        from relpos.system.slurm import SlurmExecutor

        partition, minutes, others = of_slurm
        return SlurmExecutor(resources, workers, partition, minutes, dict(others or {}))
    if memory is not None or gpus is not None:
        raise ValueError("--memory and --gpus go with --ray or --slurm: processes of this machine share what it has.")
    if workers is None and options.cores is None and default_workers is None:
        return None
    from relpos.system.executors import LocalExecutor

    return LocalExecutor(workers or default_workers or 1, options.cores)
