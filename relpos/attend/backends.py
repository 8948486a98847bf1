"""Which way attention runs. Each backend is a module with `refuses` (why it cannot, or None) and `attention`."""

import importlib
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from relpos.encodings.call import Call
from relpos.encodings.forms import Form
from relpos.errors import unknown

BACKENDS = ("reference", "chunks", "flex")


def choose(backend: str | None, q: Tensor, form: Form | None, call: Call) -> ModuleType:
    """The backend asked for, or the fastest that can run this call."""
    if backend is not None:
        if backend not in BACKENDS:
            raise unknown("backend", backend, BACKENDS)
        module = load(backend)
        reason = module.refuses(q, form, call)
        if reason:
            raise ValueError(f"the backend {backend!r} cannot run this: {reason}")
        return module
    if q.dtype == torch.float64:
        return load("reference")
    return load("chunks")


@cache
def load(backend: str) -> ModuleType:
    """The module of a backend; imported when first needed."""
    return importlib.import_module(f"relpos.attend.{backend}")
