"""What kind of execution a call is part of: plain, traced into a graph, without values, or inside torch.func."""

import contextlib

import torch
from torch import Tensor
from torch.autograd import forward_ad


def has_values(x: Tensor) -> bool:
    """Whether the values of a tensor can be looked at: not on the meta device, in a traced graph, or in torch.func."""
    return x.device.type != "meta" and not torch.compiler.is_compiling() and not is_transformed()


def is_transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is at work."""
    if torch.compiler.is_compiling():
        return False  # what is traced is plain: transforms are taken apart before
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which nothing is cast to half precision. The meta device has no autocast, and needs none."""
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
