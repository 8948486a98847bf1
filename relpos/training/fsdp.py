"""Saving and loading a model that is sharded over processes (FSDP), as full tensors in safetensors files.

The tensors are not sharded in the files, so that one process can open the model and any number of processes can resume.
All processes take part in gathering, in the order of the parameters. Loading needs no communication: each process reads
the file and keeps its shard.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from relpos.runs.checkpoints import WEIGHTS

OPTIMIZER = "optimizer.safetensors"


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
