"""Attention of a call whose arguments have been checked, by one of several backends that compute the same result.

To add a backend: write a module with what `Backend` asks for, and add its line to `BACKENDS`.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from relpos.attend import chunks, flex, native, reference, triton
from relpos.attend.arguments import Position, check_finite
from relpos.forms.bias import Form, locate, take_heads
from relpos.forms.call import Call
from relpos.forms.tracing import is_transformed
from relpos.system.errors import unknown


class Backend(Protocol):
    """What a backend's module holds."""

    FASTEST_ON: tuple[str, ...]  # types of device ("cpu", "cuda") on which it is preferred where it can run

    def refuses(self, q: Tensor, v: Tensor, form: Form | None, call: Call) -> str | None:
        """Why this backend cannot run a call, as a sentence; None if it can."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, form: Form | None, call: Call) -> tuple[Tensor, Tensor | None]:
        """Compute attention; gradients flow to q, k, v, the sinks and every tensor of the form.

        `call.rotation` is still to be applied to q and k. Returns (batch, heads, queries, value_dim) in the dtype of v;
        and the log-sum-exp of each row, (batch, heads, queries), or None if `call.return_lse` is False.
        """


BACKENDS: dict[str, Backend] = {
    "native": native,
    "flex": flex,
    "triton": triton,
    "chunks": chunks,
    "reference": reference,
}


def choose(backend: str | None, q: Tensor, v: Tensor, form: Form | None, call: Call) -> Backend:
    """The backend for a call: the one asked for, or the fastest that can run it."""
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


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Position | None,
    call: Call,
    backend: str | None = None,
    rotated: bool = False,
    heads: slice | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention with checked arguments: the encoding, or some of its heads, acts; then a backend runs."""
    q, k, form, call = positioned(q, k, position, call, rotated, heads)
    out, lse = choose(backend, q, v, form, call).attention(q, k, v.to(q.dtype), form, call)
    return out.to(v.dtype), lse


def positioned(
    q: Tensor, k: Tensor, position: Position | None, call: Call, rotated: bool = False, heads: slice | None = None
) -> tuple[Tensor, Tensor, Form | None, Call]:
    """Let the encoding act; if q and k are already rotated, on the scores alone.

    Returns:
        Queries, keys, the form of the bias, and the call with the rotation that is still to be applied to q and k. An
        encoding that changes q and k otherwise has done so here.
    """
    if position is None:
        return q, k, None, call
    if isinstance(position, Form):
        located = locate(position.fit(call), call)
        check_form(located)
        return q, k, located, call
    if "query and key" in position.places:
        rotation = None if rotated else position.rotation(call)
        factor = position.query_factor(call)
        if rotation is None and factor is None and not rotated:
            # In float32 at least: half precision would lose the angles to rounding.
            q, k = position.rotate(q.to(call.dtype), k.to(call.dtype), call)
        if factor is not None:
            check_finite("factor of the queries", factor)
            if heads is not None and factor.shape[1] > 1:
                factor = factor[:, heads]
            q, k = q.to(call.dtype) * factor, k.to(call.dtype)
        if rotation is not None:
            call = replace(call, rotation=rotation)
    form = position.located_bias(call)
    if form is not None:
        check_form(form)
        if heads is not None:
            form = take_heads(form, heads, position.heads)
    return q, k, form, call


def check_form(form: Form) -> None:
    """Refuse NaN and +inf in a bias."""
    for name, numbers in form.tensors():
        check_finite(f"{name} of the bias", numbers)


def describe() -> Mapping[str, Any]:
    """What attention runs on here: versions, backends, why the compiled kernel is missing, instruction sets."""
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
