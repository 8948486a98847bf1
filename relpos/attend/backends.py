"""Which way attention runs. Each backend is a module with `refuses` (why it cannot, or None) and `attention`."""

import warnings
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from relpos.attend import chunks, native, reference
from relpos.encodings.call import Call
from relpos.encodings.forms import Form
from relpos.encodings.tracing import is_transformed
from relpos.errors import unknown

BACKENDS = ("native", "flex", "chunks", "reference")  # as the modules beside this one
HERE: dict[str, ModuleType] = {"native": native, "chunks": chunks, "reference": reference}
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
    if q.dtype == torch.float64 or is_transformed():
        return load("reference")
    fastest = FASTEST.get(q.device.type)
    if fastest and not load(fastest).refuses(q, form, call):
        return load(fastest)
    if fastest == "native" and not torch.compiler.is_compiling():  # a graph has no place for warnings
        notice_missing_kernel()
    return load("chunks")


def load(backend: str) -> ModuleType:
    """The module of a backend. FlexAttention is slow to import, and only CUDA needs it."""
    if backend == "flex":
        from relpos.attend import flex  # noqa: PLC0415

        return flex
    return HERE[backend]


def describe() -> dict[str, Any]:
    """Describe what attention runs on here.

    Returns:
        Versions; "cpu_backend" with "native_missing" (why the compiled kernel cannot be used, or None); the
        "instruction_set" of the kernel and the "instruction_sets" that this CPU supports (None and empty without the
        kernel); "threads"; "cuda_backend" and "cuda_device" (None without a GPU).

    Example:
        >>> describe()["cpu_backend"]
        'native'
    """
    import relpos  # noqa: PLC0415  (relpos imports this module)

    available, reason = native.available()
    cuda = torch.cuda.is_available()
    return {
        "relpos": relpos.__version__,
        "torch": torch.__version__,
        "cpu_backend": "native" if available else "chunks",
        "native_missing": None if available else reason,
        "instruction_set": native.isa() if available else None,
        "instruction_sets": list(native.isas()) if available else [],
        "threads": torch.get_num_threads(),
        "cuda_backend": "flex" if cuda else None,
        "cuda_device": torch.cuda.get_device_name() if cuda else None,
    }


@cache
def notice_missing_kernel() -> None:
    """Say, once, that attention would be faster with the compiled kernel."""
    here, why = native.available()
    if not here:
        warnings.warn(f"relpos runs attention in plain torch, slower: {why}", stacklevel=4)
