"""Which way attention runs. Each backend is a module with `refuses` (why it cannot, or None) and `attention`."""

import importlib
import warnings
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from relpos.encodings.call import Call
from relpos.encodings.forms import Form
from relpos.errors import unknown

BACKENDS = ("native", "flex", "chunks", "reference")  # as the modules beside this one
FASTEST = {"cpu": "native", "cuda": "flex"}  # on a device; chunks where it refuses


def choose(backend: str | None, q: Tensor, form: Form | None, call: Call) -> ModuleType:
    """The backend asked for, or the fastest that can run this call."""
    if backend is not None:
        if backend not in BACKENDS:
            raise unknown("backend", backend, BACKENDS)
        reason = load(backend).refuses(q, form, call)
        if reason:
            raise ValueError(f"the backend {backend!r} cannot run this: {reason}")
        return load(backend)
    if q.dtype == torch.float64:
        return load("reference")
    fastest = FASTEST.get(q.device.type)
    if fastest and not load(fastest).refuses(q, form, call):
        return load(fastest)
    if fastest == "native":
        notice_missing_kernel()
    return load("chunks")


@cache
def load(backend: str) -> ModuleType:
    """The module of a backend; imported when first needed."""
    return importlib.import_module(f"relpos.attend.{backend}")


@cache
def notice_missing_kernel() -> None:
    """Say, once, that attention would be faster with the compiled kernel."""
    here, why = load("native").available()
    if not here:
        warnings.warn(f"relpos runs attention in plain torch, slower: {why}", stacklevel=4)
