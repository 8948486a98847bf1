"""How a call is executed: eagerly, traced into a graph, on the meta device, or inside torch.func."""

import contextlib

import torch
from torch import Tensor
from torch.autograd import forward_ad


def has_values(x: Tensor) -> bool:
    """Whether a tensor's values can be read: not on the meta device, in a traced graph, or in torch.func."""
    return x.device.type != "meta" and not torch.compiler.is_compiling() and not is_transformed()


def is_transformed() -> bool:
    """Whether the call is inside a transform of torch.func or forward-mode differentiation."""
    if torch.compiler.is_compiling():
        return False  # transforms are resolved before tracing
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context that disables autocast. Where it is off, as on the meta device, there is nothing to disable."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else contextlib.nullcontext()


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on. The meta device has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)
