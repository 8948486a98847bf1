"""Run the backend "flex" on a CPU, through a chosen backend of PyTorch's compiler."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention

from relpos.attend import flex
from relpos.attend.flex import kernel


def flex_on_cpu(monkeypatch: pytest.MonkeyPatch, backend: str | Callable[..., Any]) -> None:
    """Let relpos.attention(backend="flex") run here, with gradients, without graphs or masks of earlier tests.

    FlexAttention refuses gradients on a CPU because its compiled kernel has none there; its dense implementation does.
    """
    monkeypatch.setattr(flex, "refuses", lambda q, v, form, call: None)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    kernel.compiled.cache_clear()
    monkeypatch.setattr(kernel, "RECENT", kernel.Recent(8))
