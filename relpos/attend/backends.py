"""Attention of a call whose arguments have been checked, by one of several backends that compute the same result.

To add a backend: write a module with what `Backend` asks for, and add its line to `BACKENDS`.
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from relpos.attend import chunks, flex, native, reference, triton
from relpos.attend.arguments import Position, check_finite
from relpos.attend.triton import first_use
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


class PackedBias(Protocol):
    """A bias that does not depend on the input, in a kernel's layout, for all tokens below a capacity."""

    @property
    def scaled(self) -> bool:
        """Whether there is one factor per position, so that positions must not restart."""


class RunningTotals(Protocol):
    """A RankOne bias in a kernel's layout, which grows with every decoded token."""

    length: int
    fits: bool  # whether the kernel can run with the first tokens

    def append(self, step: Tensor, weight: Tensor | None) -> bool:
        """Add tokens, and return whether they fit; if not, all are to be packed again."""

    def crop(self, length: int) -> None:
        """Forget all tokens from `length` on."""


class DecodingBackend(Backend, Protocol):
    """A backend for which a decoder keeps the bias packed between its steps."""

    __name__: str
    FEW: int  # queries of a step at most

    def refuses_call(self, form: Form | None, call: Call) -> str | None:
        """Why it cannot run a form, the masks or the positions of a call, as a sentence; None if it can."""

    def packed_bias(self, form: Form, capacity: int) -> PackedBias | None:
        """The form, of as many queries and keys as the capacity, packed; None if that cannot be kept."""

    def running_totals(self, step: Tensor, weight: Tensor | None, capacity: int) -> RunningTotals:
        """Steps and weights of the first tokens, (batch, heads, tokens), packed, with room for later ones."""

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, form: Form | None, call: Call, *, packed: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention; `packed` is the bias in place of `form`, in a call without gradients."""


DECODING: tuple[DecodingBackend, ...] = (native, triton)
BACKENDS: dict[str, Backend] = {
    "native": native,
    "flex": flex,
    "triton": triton,
    "chunks": chunks,
    "reference": reference,
}


GPU = "RELPOS_GPU"  # in the environment: the backend of all calls on CUDA and ROCm that name none
GPU_BACKENDS = ("flex", "triton")


def choose(backend: str | None, q: Tensor, v: Tensor, form: Form | None, call: Call) -> Backend:
    """The backend for a call: the one asked for, or the first of the preferred ones that can run it.

    No value of a tensor is read, except at the first use of the Triton kernels for a form.
    """
    if backend is not None:
        if backend not in BACKENDS:
            raise unknown("backend", backend, BACKENDS)
        chosen = BACKENDS[backend]
        reason = chosen.refuses(q, v, form, call) or (first_use.failure(q, v, form) if chosen is triton else None)
        if reason:
            raise ValueError(f"the backend {backend!r} cannot run this: {reason}")
        return chosen
    if q.dtype == torch.float64 or is_transformed():
        return reference
    for candidate in preferred(q.device.type, form):
        if candidate.refuses(q, v, form, call):
            continue
        failure = first_use.failure(q, v, form) if candidate is triton else None
        if failure is None:
            return candidate
        if not torch.compiler.is_compiling():  # a traced graph cannot warn
            notice_failure(failure)
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        notice_missing_kernel()
    return chunks


def preferred(device: str, form: Form | None) -> list[Backend]:
    """The backends that are faster than `chunks` on a type of device, in the order in which they are tried."""
    names = [name for name, candidate in BACKENDS.items() if device in candidate.FASTEST_ON]
    if device == "cuda":
        asked = gpu_backend()
        if asked == "flex":
            names = [name for name in names if name != "triton"]
        elif asked == "triton":
            names = ["triton", *(name for name in names if name != "triton")]
        elif torch.are_deterministic_algorithms_enabled() and wants_gradient(form):
            # FlexAttention adds these gradients by atomics, in any order, and does not say so.
            names = [name for name in names if name != "flex"]
    return [BACKENDS[name] for name in names]


def gpu_backend() -> str | None:
    """The backend that RELPOS_GPU asks for, "flex" or "triton"; None if it is not set."""
    asked = os.environ.get(GPU)
    if asked is not None and asked not in GPU_BACKENDS:
        raise ValueError(
            f"the environment variable {GPU} is {asked!r}: allowed are {' and '.join(GPU_BACKENDS)}; unset it, and "
            "relpos chooses."
        )
    return asked


def wants_gradient(form: Form | None) -> bool:
    """Whether a gradient will flow to a number of the bias."""
    return form is not None and torch.is_grad_enabled() and any(x.requires_grad for _, x in form.tensors())


def decoding_backend(backend: str | None, q: Tensor, v: Tensor, call: Call) -> DecodingBackend | None:
    """The backend that would run this call without a bias, if a decoder can keep a bias packed for it."""
    chosen = choose(backend, q, v, None, call)
    return next((candidate for candidate in DECODING if candidate is chosen), None)


def runs_packed(kernel: DecodingBackend, q: Tensor, v: Tensor, packed: Any) -> bool:
    """Whether a kernel may run a packed bias here: those of Triton are checked at first use, form by form."""
    return kernel is not triton or first_use.failure_of(q, v, packed.names) is None


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
    has_triton, triton_reason = triton.available()
    cuda = torch.cuda.is_available()
    asked = gpu_backend()
    checks = first_use.known_verdicts() if cuda and has_triton else ()
    return {
        "relpos": __version__,
        "torch": torch.__version__,
        "cpu_backend": "native" if available else "chunks",
        "native_missing": None if available else reason,
        "instruction_set": native.isa() if available else None,
        "instruction_sets": list(native.isas()) if available else [],
        "threads": torch.get_num_threads(),
        "cuda_backend": asked or "flex" if cuda else None,
        "cuda_device": torch.cuda.get_device_name() if cuda else None,
        "triton_missing": None if has_triton else triton_reason,
        "triton_first_use": [
            {"kernels": str(subject), "passed": verdict.passed, "result": str(verdict)} for subject, verdict in checks
        ],
    }


@cache
def notice_missing_kernel() -> None:
    """Warn once that attention would be faster with the compiled kernel, if that is missing."""
    available, reason = native.available()
    if not available:
        warnings.warn(f"relpos runs attention in plain torch, which is slower: {reason}", stacklevel=4)


@cache
def notice_failure(failure: str) -> None:
    """Warn once that the Triton kernels are not used, and why."""
    warnings.warn(
        f"{failure} Another backend runs in their place. Please report it, with the output of `relpos gpu-report`.",
        stacklevel=4,
    )
