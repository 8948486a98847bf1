"""Training over several processes: windows that they share, and a model that is sharded over them."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, default_data_collator

from relpos.models.context import slice_window
from relpos.runs.checkpoints import WEIGHTS

OPTIMIZER = "optimizer.safetensors"


def check_processes(context: int, processes: int) -> None:
    """Refuse a number of processes that cannot be divided into groups.

    Args:
        context: Processes per group, run.context_parallel.
        processes: Number of processes.

    Raises:
        ValueError: It cannot.
    """
    if processes % context:
        raise ValueError(
            f"run.context_parallel={context} divides each window among {context} processes, and there "
            f"{'is 1' if processes == 1 else f'are {processes}'}: start a multiple of {context}, as in torchrun "
            f"--nproc-per-node {context} -m relpos.cli train …"
        )


def context_group(context: int) -> ProcessGroup:
    """The group of this process: `context` processes with consecutive ranks. All processes call this."""
    group: ProcessGroup = torch.distributed.new_subgroups(context)[0]  # type: ignore[no-untyped-call]
    return group


def make_collator(
    tokenizer: PreTrainedTokenizerFast, state: PartialState, context: int
) -> Callable[[list[Any]], dict[str, Tensor]] | None:
    """What makes a batch of windows; None for Trainer's own.

    All windows have one length. Trainer's own collator asks for a padding token, which many tokenizers lack.
    """
    if context == 1:
        return default_data_collator if tokenizer.pad_token_id is None else None
    rank = state.process_index % context
    return lambda windows: slice_window(default_data_collator(windows), rank, context)


def share_windows(accelerator: Accelerator, context: int) -> None:
    """Let the processes of a group read the same windows: accelerate counts the groups in place of the processes."""
    prepare = accelerator.prepare_data_loader

    def prepared(loader: Any, *args: Any, **options: Any) -> Any:
        fresh = not getattr(loader, "_is_accelerate_prepared", False)
        loader = prepare(loader, *args, **options)
        if fresh:
            shard = loader.batch_sampler  # gives each process its batches
            shard.num_processes, shard.process_index = shard.num_processes // context, shard.process_index // context
        return loader

    accelerator.prepare_data_loader = prepared


def save_model(model: PreTrainedModel, folder: Path, writes: bool) -> None:
    """Save a sharded model as `save_pretrained` saves a complete one. All processes must call this.

    Args:
        model: The sharded model.
        folder: The folder to write to.
        writes: Whether this process writes the files.
    """
    full = {name: gather(parameter) for name, parameter in model.named_parameters()}
    if not writes:
        return
    with torch.device("meta"):
        complete = type(model)(copy.deepcopy(model.config))
    complete.load_state_dict(full, strict=False, assign=True)
    complete.tie_weights()
    complete.save_pretrained(folder)


def load_model(model: nn.Module, folder: Path) -> None:
    """Load the weights of a checkpoint into a sharded model; each process takes its shard.

    Args:
        model: The sharded model.
        folder: The checkpoint's folder.
    """
    saved = load_file(folder / WEIGHTS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_shard(saved[name], parameter))


def save_optimizer(model: nn.Module, optimizer: Any, folder: Path, writes: bool) -> None:
    """Save the state of the optimizer of a sharded model. All processes must call this.

    Args:
        model: The sharded model.
        optimizer: Its optimizer.
        folder: The checkpoint's folder.
        writes: Whether this process writes the file.
    """
    state = {
        f"{name}/{key}": gather(value)
        for name, parameter in model.named_parameters()
        for key, value in sorted(optimizer.state[parameter].items())
    }
    if writes:
        save_file(state, folder / OPTIMIZER)


def load_optimizer(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Load the state of the optimizer of a sharded model; each process takes its shard."""
    parameters = dict(model.named_parameters())
    for full_name, saved in load_file(folder / OPTIMIZER).items():
        name, key = full_name.rsplit("/", 1)
        parameter = parameters[name]
        is_sharded = saved.shape == parameter.shape  # all state but the number of steps
        optimizer.state[parameter][key] = _shard(saved, parameter) if is_sharded else saved


def gather(tensor: Tensor) -> Tensor:
    """The full tensor on the CPU, gathered from all processes if it is sharded. All processes must call this."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().contiguous()


def _shard(saved: Tensor, like: Tensor) -> Tensor:
    """This process's shard of `saved`, sharded as `like` is."""
    if not isinstance(like, DTensor):
        return saved
    # Without a source rank nothing is sent: every process has read the same file.
    return distribute_tensor(saved.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
