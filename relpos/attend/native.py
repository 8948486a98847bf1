"""Attention by the compiled CPU kernel: exact, in memory linear in the length, forward and backward.

`attention` converts a form to the kernel's inputs by differentiable torch; the two operators of `kernel_ops` run it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.attend import kernel_ops, library
from relpos.attend.hinges import hinges
from relpos.attend.kernel_ops import skipped_fraction
from relpos.attend.library import isa, isas
from relpos.encodings.call import Call
from relpos.encodings.forms import Form, RankOne, Scaled, Toeplitz, terms
from relpos.encodings.tracing import is_transformed

__all__ = ["FASTEST_ON", "attention", "available", "isa", "isas", "refuses", "skipped_fraction"]

FASTEST_ON: tuple[str, ...] = ("cpu",)
MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def available() -> tuple[bool, str]:
    """Whether the kernel can run here, and the reason if not."""
    try:
        library.load()
    except RuntimeError as error:
        return False, str(error)
    return True, ""


def refuses(q: Tensor, form: Form | None, call: Call) -> str | None:
    """Why the kernel cannot run this call, as a sentence; None if it can."""
    if not torch.compiler.is_compiling():  # tracing does not load the library; the operator does, when it runs
        loaded, reason = available()
        if not loaded:
            return reason
    if q.device.type != "cpu":
        return f"the native kernel runs on the CPU, but q is on {q.device}."
    if q.dtype not in DTYPES:
        return f"the native kernel computes in float32, but q is {q.dtype}."
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"the native kernel runs head_dim up to {MAX_HEAD_DIM}, not {q.shape[-1]}."
    if is_transformed():
        return (
            "the native kernel has reverse-mode gradients only, and this call is inside a transform of torch.func or "
            "forward-mode differentiation: leave backend= out, and the reference runs (in memory length²)."
        )
    new = (call.mask, call.window, call.sinks, call.softcap, call.dropout or None, call.return_lse or None)
    moved = call.first + call.queries != call.keys
    other = (
        "the native kernel does not run this yet."
        if moved or not call.even or any(x is not None for x in new)
        else None
    )
    return other or refuses_form(form)


def refuses_form(form: Form | None) -> str | None:
    """Why the kernel cannot run a form, as a sentence; None if it can."""
    if any(isinstance(term, Scaled) and term.column is not None for term in terms(form)):
        return "the native kernel runs Scaled in causal attention only: it has no scale per key."
    kinds = [type(term) for term in terms(form)]
    runs = not kinds or kinds == [Scaled] or (set(kinds) <= {Toeplitz, RankOne} and kinds.count(RankOne) <= 1)
    if not runs:
        names = " + ".join(kind.__name__ for kind in kinds)
        return f"the native kernel cannot run the form {names}: it runs Toeplitz, RankOne, their sum, and Scaled."
    return None


def attention(
    q: Tensor, k: Tensor, v: Tensor, form: Form | None, call: Call, skip: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Compute attention by the compiled kernel; gradients flow to q, k, v and every tensor of the form.

    Args:
        q: Queries, (batch, heads, queries, head_dim), rotated if the encoding rotates.
        k: Keys, (batch, key_heads, keys, head_dim), rotated if the encoding rotates.
        v: Values, in the shape of k.
        form: The bias, or None.
        call: The call of attention.
        skip: Whether the kernel may leave out tiles whose weights are provably below 2^−24 of their rows.
            `skipped_fraction` returns how many the last call left out.

    Returns:
        (batch, heads, queries, head_dim) in the dtype of q.

    Raises:
        RuntimeError: The kernel cannot run this call.
    """
    q, k = call.rotated(q, k)
    v = v.to(q.dtype)
    reason = refuses(q, form, call)
    if reason is not None:
        raise RuntimeError(reason)
    table = total = weight = inverse = knot = base = gain = bend = None
    zero, symmetric = call.zero, False
    for term in terms(form):
        if isinstance(term, Toeplitz):
            own = toeplitz_table(term, call)  # (heads, distances)
            table = own if table is None else table + own
        elif isinstance(term, RankOne):
            shape = (q.shape[0], q.shape[1], call.keys)
            total = term.total.double().expand(shape)
            weight = None if term.weight is None else term.weight.float().expand(shape)
            symmetric = term.symmetric
        elif isinstance(term, Scaled):
            inverse = F.pad(1.0 / term.row.double(), (call.first, 0))  # (1 or batch, keys)
            knot, base, gain, bend = hinges(term, inverse)
            # The distance of a key after the query counts as 0.
            table = term.table.float() if call.causal else term.table.float()[call.distances.long().clamp(min=0)]
    out: Tensor = kernel_ops.forward(
        *(x.float() for x in (q, k, v)),
        table, total, weight, inverse, knot, base, gain, bend,
        call.documents, call.padding, zero, call.causal, symmetric, call.scale, skip,
    )[0]  # fmt: skip
    return out.to(q.dtype), None


def toeplitz_table(form: Toeplitz, call: Call) -> Tensor:
    """The form's table over the distances of the call: (heads, distances)."""
    distances = call.keys if call.causal else 2 * call.keys - 1
    if form.table.shape[1] == distances and form.zero == call.zero:
        return form.table.float()
    column = torch.arange(distances) - call.zero + form.zero
    return form.table.float()[:, column.clamp(0, form.table.shape[1] - 1)]
