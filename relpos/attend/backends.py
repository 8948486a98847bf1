"""The backends of attention: several ways to compute the same result.

To add a backend: write a module with what `Backend` asks for, and add its line to `BACKENDS`.
"""

import warnings
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from relpos.attend import chunks, flex, native, reference
from relpos.forms.bias import Form
from relpos.forms.call import Call
from relpos.forms.tracing import is_transformed
from relpos.system.errors import unknown


class Backend(Protocol):
    """What a backend's module holds.

    Attributes:
        FASTEST_ON: Types of device ("cpu", "cuda") on which this backend is preferred where it can run.
    """

    FASTEST_ON: tuple[str, ...]

    def refuses(self, q: Tensor, v: Tensor, form: Form | None, call: Call) -> str | None:
        """Say why this backend cannot run a call.

        Args:
            q: Queries, (batch, heads, queries, head_dim).
            v: Values, (batch, key_heads, keys, value_dim).
            form: The bias, or None.
            call: The call of attention.

        Returns:
            The reason as a sentence, or None if it can run the call.
        """

    def attention(self, q: Tensor, k: Tensor, v: Tensor, form: Form | None, call: Call) -> tuple[Tensor, Tensor | None]:
        """Compute attention; gradients flow to q, k, v, the sinks and every tensor of the form.

        Args:
            q: Queries, (batch, heads, queries, head_dim). `call.rotation` is still to be applied to q and k.
            k: Keys, (batch, key_heads, keys, head_dim).
            v: Values, (batch, key_heads, keys, value_dim).
            form: The bias, or None.
            call: The call of attention.

        Returns:
            (batch, heads, queries, value_dim) in the dtype of v; and the log-sum-exp of each row, (batch, heads,
            queries), or None if `call.return_lse` is False.
        """


BACKENDS: dict[str, Backend] = {"native": native, "flex": flex, "chunks": chunks, "reference": reference}


def choose(backend: str | None, q: Tensor, v: Tensor, form: Form | None, call: Call) -> Backend:
    """Choose the backend for a call.

    Args:
        backend: Its name; if None, the fastest backend that can run the call.
        q: Queries, (batch, heads, queries, head_dim).
        v: Values, (batch, key_heads, keys, value_dim).
        form: The bias, or None.
        call: The call of attention.

    Returns:
        The backend.

    Raises:
        ValueError: No backend has this name, or it cannot run the call.
    """
    if backend is not None:
        if backend not in BACKENDS:
            raise unknown("backend", backend, BACKENDS)
        reason = BACKENDS[backend].refuses(q, v, form, call)
        if reason:
            raise ValueError(f"the backend {backend!r} cannot run this: {reason}")
        return BACKENDS[backend]
    if q.dtype == torch.float64 or is_transformed():
        return reference
    for candidate in BACKENDS.values():
        if q.device.type in candidate.FASTEST_ON and not candidate.refuses(q, v, form, call):
            return candidate
    if q.device.type == "cpu" and not torch.compiler.is_compiling():  # a traced graph cannot warn
        notice_missing_kernel()
    return chunks


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
    from relpos import __version__  # noqa: PLC0415  (relpos imports this module)

    available, reason = native.available()
    cuda = torch.cuda.is_available()
    return {
        "relpos": __version__,
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
    """Warn once that attention would be faster with the compiled kernel, if that is missing."""
    available, reason = native.available()
    if not available:
        warnings.warn(f"relpos runs attention in plain torch, which is slower: {reason}", stacklevel=4)
