"""Saving and loading a model whose weights are sharded over processes (FSDP), as whole tensors in safetensors files.

Whole, so that one process opens them and any number of processes goes on from them; and without the pickles of
PyTorch's own sharded checkpoints. Gathering is done by all processes together, in the order of the parameters; loading
needs no word between them, since each reads the file and keeps its part.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from relpos.lab.runs.checkpoints import WEIGHTS

OPTIMIZER = "optimizer.safetensors"


def save_model(model: PreTrainedModel, folder: Path, writes: bool) -> None:
    """What `save_pretrained` would write of the whole model. Called by all, written by the one that `writes`."""
    found = {name: whole(parameter) for name, parameter in model.named_parameters()}
    if not writes:
        return
    with torch.device("meta"):
        alone = type(model)(copy.deepcopy(model.config))
    alone.load_state_dict(found, strict=False, assign=True)
    alone.tie_weights()
    alone.save_pretrained(folder)


def load_model(model: nn.Module, folder: Path) -> None:
    """Each process takes its part of the saved weights."""
    saved = load_file(folder / WEIGHTS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_part(saved[name], parameter))


def save_optimizer(model: nn.Module, optimizer: Any, folder: Path, writes: bool) -> None:
    """The optimizer's numbers for every parameter, by its name. Called by all, written by the one that `writes`."""
    found = {
        f"{name}/{key}": whole(value)
        for name, parameter in model.named_parameters()
        for key, value in sorted(optimizer.state[parameter].items())
    }
    if writes:
        save_file(found, folder / OPTIMIZER)


def load_optimizer(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Each process takes its part of the saved numbers."""
    parameters = dict(model.named_parameters())
    for full_name, saved in load_file(folder / OPTIMIZER).items():
        name, key = full_name.rsplit("/", 1)
        parameter = parameters[name]
        number = saved if saved.shape != parameter.shape else _part(saved, parameter)  # the count of steps is no part
        optimizer.state[parameter][key] = number


def whole(tensor: Tensor) -> Tensor:
    """All parts of a sharded tensor, gathered from all processes."""
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().cpu().contiguous()


def _part(saved: Tensor, like: Tensor) -> Tensor:
    """What this process holds of `saved`, sharded as `like` is."""
    if not isinstance(like, DTensor):
        return saved
    # Without a source rank nothing is sent: every process has read the same.
    return distribute_tensor(saved.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
