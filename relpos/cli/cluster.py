"""Options that say where the parts of a command run: processes of this machine, a Ray cluster, or SLURM."""

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relpos.cli.options import Command, default, parse_options

if TYPE_CHECKING:
    from relpos.system.executors.interface import Executor

PANEL = "Where the parts run (docs/scale.md)"  # group of these options in the help
UNITS = {"KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
ADDRESS = re.compile(r"auto|local|ray://.*|[\w.-]+:\d+|\[[\da-fA-F:]+\]:\d+")

Workers = Annotated[
    int | None,
    typer.Option(
        help="Parts at a time. Those of this machine divide its cores among them.  "
        f"{default('1; on a cluster as many as have a place')}",
        min=1,
        rich_help_panel=PANEL,
    ),
]
Cores = Annotated[
    int | None,
    typer.Option(
        help="Cores of each part, and its threads: the same number gives the same result to the bit.  "
        f"{default('cores ÷ workers; 1 on a cluster')}",
        min=1,
        rich_help_panel=PANEL,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory of each part on a cluster, as in 8GB.", rich_help_panel=PANEL),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        help="GPUs of each part on a cluster. With several, it is trained by one process per GPU.  " + default(0),
        min=0,
        rich_help_panel=PANEL,
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="[ADDRESS]",
        help="Run the parts on a Ray cluster: the one of this machine or of RAY_ADDRESS, the one at an address such as "
        "10.0.0.1:6379, or with local one that lasts as long as the command.",
        rich_help_panel=PANEL,
    ),
]
Slurm = Annotated[bool, typer.Option("--slurm", help="Run the parts as jobs of SLURM.", rich_help_panel=PANEL)]
Partition = Annotated[
    str | None, typer.Option(metavar="NAME", help="Partition of the jobs of SLURM.", rich_help_panel=PANEL)
]
Minutes = Annotated[
    int | None,
    typer.Option(help="Time limit of each job of SLURM, in minutes.  " + default(60), min=1, rich_help_panel=PANEL),
]
SlurmOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Any other option of sbatch, as in account=lab; may be repeated.",
        rich_help_panel=PANEL,
    ),
]


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
        ValueError: It is no such size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)?", text.strip().upper())
    if match is None or not float(match[1]):
        raise ValueError(f"--memory takes a size such as 8GB or 512MB, not {text!r}.")
    return int(float(match[1]) * UNITS.get(match[2] or "", 1))


def make_executor(
    workers: int | None,
    cores: int | None,
    memory: str | None,
    gpus: int | None,
    ray: str | None,
    slurm: bool,
    partition: str | None,
    minutes: int | None,
    options: list[str] | None,
    default_workers: int | None = None,
) -> "Executor | None":
    """The executor that the options describe.

    Args:
        workers: --workers.
        cores: --cores.
        memory: --memory.
        gpus: --gpus.
        ray: --ray.
        slurm: --slurm.
        partition: --slurm-partition.
        minutes: --slurm-minutes.
        options: --slurm-option.
        default_workers: Processes of this machine if no option is given; None to run in this process.

    Raises:
        ValueError: Options contradict each other, or there is no such cluster.
        ModuleNotFoundError: The extra that a cluster needs is not installed.
    """
    from relpos.system.executors.interface import Resources

    if ray is not None and slurm:
        raise ValueError("give --ray or --slurm, not both.")
    if not slurm and (partition, minutes, options or None) != (None, None, None):
        raise ValueError("--slurm-partition, --slurm-minutes and --slurm-option go with --slurm.")
    resources = Resources(cores or 1, None if memory is None else parse_memory(memory), gpus or 0)
    if ray is not None:
        from relpos.system.executors.ray import RayExecutor

        return RayExecutor(ray, resources, workers)
    if slurm:
        from relpos.system.executors.slurm import SlurmExecutor

        return SlurmExecutor(resources, workers, partition, minutes, parse_options(options or []))
    if memory is not None or gpus is not None:
        raise ValueError("--memory and --gpus go with --ray or --slurm: processes of this machine share what it has.")
    if workers is None and cores is None and default_workers is None:
        return None
    from relpos.system.executors.local import LocalExecutor

    return LocalExecutor(workers or default_workers or 1, cores)
