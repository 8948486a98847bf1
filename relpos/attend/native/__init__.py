"""Attention by the compiled CPU kernel: exact, in memory linear in the length, forward and backward.

`attention` converts a form to the kernel's inputs by differentiable torch; the two operators of `operators` run it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from relpos.attend import kernel_inputs
from relpos.attend.kernel_inputs import TENSORS, Inputs, columns, refuses_tensors
from relpos.attend.kernel_operators import needs_operator
from relpos.attend.native import library, operators
from relpos.attend.native.library import FEW, MAX_DIM, isa, isas
from relpos.attend.native.operators import skipped_fraction
from relpos.attend.native.packing import PackedBias, RunningTotals
from relpos.attend.native.problem import Problem
from relpos.forms.bias import Form, RankOne, Scaled, Toeplitz, terms
from relpos.forms.call import Call

__all__ = [
    "FASTEST_ON",
    "FEW",
    "MAX_DIM",
    "PackedBias",
    "RunningTotals",
    "attention",
    "available",
    "every_tile",
    "isa",
    "isas",
    "mass",
    "needs_operator",
    "packed_bias",
    "refuses",
    "refuses_call",
    "refuses_mass",
    "running_totals",
    "skipped_fraction",
]

FASTEST_ON: tuple[str, ...] = ("cpu",)
_skips = True  # see every_tile


def available() -> tuple[bool, str]:
    """Whether the kernel can run here, and the reason if not."""
    try:
        library.load()
    except RuntimeError as error:
        return False, str(error)
    return True, ""


def refuses(q: Tensor, v: Tensor, form: Form | None, call: Call) -> str | None:
    """Why the kernel cannot run this call, as a sentence; None if it can."""
    if not torch.compiler.is_compiling():  # tracing does not load the library; the operator does, when it runs
        loaded, reason = available()
        if not loaded:
            return reason
    if q.device.type != "cpu":
        return f"the native kernel runs on the CPU, but q is on {q.device}."
    return refuses_tensors("the native kernel", q, v, MAX_DIM) or refuses_call(form, call)


def refuses_call(form: Form | None, call: Call) -> str | None:
    """Why the kernel cannot run a form, the masks or the positions of a call, as a sentence; None if it can."""
    parts = terms(form)
    kinds = [type(term) for term in parts]
    runs = not kinds or kinds == [Scaled] or (set(kinds) <= {Toeplitz, RankOne} and kinds.count(RankOne) <= 1)
    if not runs:
        names = " + ".join(kind.__name__ for kind in kinds)
        return f"the native kernel cannot run the form {names}: it runs Toeplitz, RankOne, their sum, and Scaled."
    if any(isinstance(term, Scaled) and term.column is not None for term in parts):
        return "the native kernel runs a Scaled bias that is scaled per query, and this one is scaled per key too."
    if call.mask is not None:
        return "the native kernel cannot run mask=: it runs causal=, window=, documents= and padding=."
    if call.first < 0:
        return f"the native kernel counts tokens from 0, and the first query has the index {call.first}."
    by_distance = [term for term in parts if isinstance(term, Toeplitz | Scaled)]
    if any(term.where is not None for term in by_distance) or (by_distance and not call.even):
        return (
            "the native kernel reads a bias over distances by the difference of two indices, which is not the distance "
            "of these positions=."
        )
    return _refuses_beyond_keys(parts, call)


def _refuses_beyond_keys(parts: Sequence[Form], call: Call) -> str | None:
    end = call.first + call.queries
    tokens = [("a RankOne bias has", term.total.shape[-1]) for term in parts if isinstance(term, RankOne)]
    if call.documents is not None:
        tokens.append(("documents= have", call.documents.shape[1]))
    for what, number in tokens:
        if end > number:
            queries = f"the queries, {call.first} to {end - 1}, are not all among {number} keys"
            return f"{what} one value per key, and {queries}."
    return None


def packed_bias(form: Form, capacity: int) -> PackedBias:
    """A bias that does not depend on the input, packed for all tokens below a capacity."""
    return PackedBias(form, capacity)


def running_totals(step: Tensor, weight: Tensor | None, capacity: int) -> RunningTotals:
    """A RankOne bias that grows with every decoded token, from steps and weights (batch, heads, tokens)."""
    return RunningTotals(step, weight, capacity)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    form: Form | None,
    call: Call,
    skip: bool | None = None,
    packed: PackedBias | RunningTotals | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention that `refuses` has not refused; gradients flow to q, k, v, the sinks and the form's tensors.

    With `skip` (by default, unless `every_tile` says otherwise) the kernel leaves out tiles whose weights are provably
    below 2^−24 of their rows; `skipped_fraction` returns how many the last call left out. For calls without gradients,
    `packed` is the bias in place of `form`. The output has the dtype of q, the log-sum-exp float32.
    """
    skip = _skips if skip is None else skip
    inputs = make_inputs(q, k, v, form, call, skip and packed is None)
    if packed is not None:
        problem = Problem(inputs)
        packed.fill(problem.fields)
        out, lse, _, _ = operators.run_problem(inputs, problem)
    elif needs_operator(getattr(inputs, name) for name in TENSORS):
        out, lse, _, _ = operators.forward(*inputs.values())
    else:
        out, lse, _, _ = operators.run(inputs)
    return out, lse if call.return_lse else None


@contextmanager
def every_tile() -> Iterator[None]:
    """Compute every tile inside this context, also those that do not matter, to measure what skipping saves."""
    global _skips  # noqa: PLW0603
    before, _skips = _skips, False
    try:
        yield
    finally:
        _skips = before


def refuses_mass(q: Tensor, form: Form | None, call: Call) -> str | None:
    """Why the kernel cannot sum the weights of this call by distance, as a sentence; None if it can."""
    if not call.even:
        return "the native kernel sums weights by the difference of two indices, and these positions= have gaps."
    return refuses(q, q, form, call)  # there are no values


@torch.no_grad()
def mass(q: Tensor, k: Tensor, form: Form | None, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the weights of a call that `refuses_mass` has not refused, without dropout, by the difference of indices.

    Returns:
        Sums over `call.distances`, without the first token of each query's document, (batch, heads, distances); the
        sum of the weights of those tokens, (batch, heads); and how many queries see a key, (batch, heads).
    """
    inputs = make_inputs(q, k, k, form, call, skip=False)
    inputs.dropout = 0.0
    problem, _ = operators.make_problem(inputs)
    p, pad = problem.fields, library.constant("TABLE_PAD")
    heads, (zero, distances) = tuple(q.shape[:2]), columns(call)
    p.zero, p.distances = zero + pad, distances
    sums = torch.empty(*heads, distances + 2 * pad, dtype=torch.float64)
    first, rows = torch.empty(heads, dtype=torch.float64), torch.empty(heads, dtype=torch.int64)
    p.mass, p.mass_first, p.mass_rows = sums.data_ptr(), first.data_ptr(), rows.data_ptr()
    problem.run("relpos_mass")
    return sums[..., pad : pad + distances].to(call.dtype), first.to(call.dtype), rows


def make_inputs(q: Tensor, k: Tensor, v: Tensor, form: Form | None, call: Call, skip: bool) -> Inputs:
    """The kernel's inputs for a call that it can run, with the rotation."""
    rotation = call.rotation
    if rotation is not None and any(x.requires_grad for x in (rotation.q_cos, rotation.q_sin)):
        q, k = rotation.apply(q, k)  # the kernel has no gradient of the angles
        rotation = None
    inputs = kernel_inputs.make_inputs(q, k, v, form, call, skip)
    if rotation is not None:
        inputs.q_cos, inputs.q_sin = rotation.q_cos, rotation.q_sin
        inputs.k_cos, inputs.k_sin = rotation.k_cos, rotation.k_sin
        inputs.interleaved = rotation.layout == "interleaved"
    return inputs
