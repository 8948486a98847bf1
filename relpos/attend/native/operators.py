"""The native kernel's forward and backward, and its operators, `relpos::attention` and its backward."""

import ctypes
import math

import torch
from torch import Tensor

from relpos.attend.kernel_inputs import BIAS, Inputs
from relpos.attend.kernel_operators import Results, empty_out, register
from relpos.attend.native import library
from relpos.attend.native.library import Array, constant
from relpos.attend.native.packing import TablePacking, TotalsPacking, kinds
from relpos.attend.native.problem import Problem

_last_counts: Tensor | None = None


def skipped_fraction() -> float:
    """Share of the visible tiles that the last forward, in any thread, did not compute."""
    counts = _last_counts
    if counts is None:
        return 0.0
    visible, scored = counts[:, 1].sum().item(), counts[:, 2].sum().item()
    return 1.0 - scored / visible if visible else 0.0


def make_problem(inputs: Inputs) -> tuple[Problem, list[TablePacking | TotalsPacking]]:
    """The problem for the kernel, with its bias packed."""
    problem = Problem(inputs)
    return problem, [kind(inputs, problem) for kind in kinds(inputs)]


def skipping_words(inputs: Inputs) -> int:
    """Length of the record of skipped tiles (native/src/skipping.h), in 64-bit words; 0 if none is ever skipped."""
    forms = kinds(inputs)
    if not (inputs.skip and forms and all(form.skips for form in forms)) or inputs.softcap or inputs.dropout:
        return 0
    tile, first = constant("TILE"), inputs.start
    batch, heads, queries, _ = inputs.q.shape
    key_blocks = (inputs.k.shape[2] + tile - 1) // tile
    query_blocks = (first + queries - 1) // tile - first // tile + 1
    return batch * heads * constant("SKIP_COUNTS") + (batch * heads * query_blocks * key_blocks + 7) // 8


def run(inputs: Inputs) -> Results:
    """Run the forward, as the operator does, but without the operator's cost of some ten microseconds."""
    return run_problem(inputs, make_problem(inputs)[0])


def run_problem(inputs: Inputs, problem: Problem) -> Results:
    """Run the forward for the problem that was made of the inputs."""
    global _last_counts  # noqa: PLW0603
    p = problem.fields
    rows = inputs.q.shape[:3]
    out, lse = empty_out(inputs), torch.empty(2, *rows, dtype=torch.float32)
    words = skipping_words(inputs)
    skipping = torch.zeros(words, dtype=torch.int64)
    p.out, p.lse, p.skipping = Array.of(out), lse.data_ptr(), skipping.data_ptr() or None
    problem.run("relpos_forward")
    heads, counts = rows[0] * rows[1], constant("SKIP_COUNTS")
    _last_counts = skipping[: heads * counts].view(heads, counts).clone() if words else None
    return out, natural(lse, inputs.sinks) if inputs.return_lse else lse.new_empty(0), lse, skipping


def natural(lse: Tensor, sinks: Tensor | None) -> Tensor:
    """The natural logarithm of the sum, from the kernel's two parts in base 2; −inf for a row without any term."""
    total = torch.where(lse[0] == math.inf, -math.inf, (lse[0] + lse[1]) * math.log(2.0))
    # A sum is at least its sink, which in base 2 may be beyond float32.
    return total if sinks is None else torch.maximum(total, sinks.float()[:, None])


class NativeKernel:
    """The compiled CPU kernel, as its operators run it.

    The log-sum-exp for the backward, (2, batch, heads, queries), has base 2 and two parts: the largest score of a row,
    and the logarithm of the remaining sum. The record is that of skipped tiles.
    """

    def run(self, inputs: Inputs) -> Results:
        return run(inputs)

    def fake(self, inputs: Inputs) -> Results:
        rows, q = inputs.q.shape[:3], inputs.q
        return (
            empty_out(inputs),
            q.new_empty(rows if inputs.return_lse else 0, dtype=torch.float32),
            q.new_empty(2, *rows, dtype=torch.float32),
            q.new_empty(skipping_words(inputs), dtype=torch.int64),
        )

    def gradients(
        self, inputs: Inputs, grad: Tensor, grad_lse: Tensor | None, results: Results, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        out, _, lse, skipping = results
        problem, forms = make_problem(inputs)
        p = problem.fields
        grads = {name: torch.empty_like(getattr(inputs, name), memory_format=torch.contiguous_format) for name in "qkv"}
        p.grad_q, p.grad_k, p.grad_v = (Array.of(x) for x in grads.values())
        p.grad_out, p.out, p.lse = problem.array(grad), problem.array(out), problem.keep(lse).data_ptr()
        p.skipping = problem.keep(skipping).data_ptr() or None
        if grad_lse is not None:
            p.grad_lse = problem.keep(grad_lse.float()).data_ptr()
        sums: dict[str, Tensor] = {}
        learns = not wanted.isdisjoint(BIAS)
        if learns:
            slots = library.load().relpos_slots(ctypes.byref(p))
            for form in forms:
                sums |= form.buffers(slots)
            for name, x in sums.items():
                setattr(p, name, x.data_ptr())
        problem.run("relpos_backward")
        if learns:
            for form in forms:
                grads |= form.gradients(sums)
        if inputs.sinks is not None:
            grads["sinks"] = sinks_gradient(inputs.sinks, out, lse, grad, grad_lse)
        return grads


def sinks_gradient(sinks: Tensor, out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None) -> Tensor:
    """A sink takes its share of every row from the output, and adds to its log-sum-exp: (heads,)."""
    share = (sinks.float()[:, None] - natural(lse, sinks)).exp()  # (batch, heads, queries)
    moved = -(out.float() * grad.float()).sum(-1)
    if grad_lse is not None:
        moved = moved + grad_lse
    return (share * moved).sum((0, 2)).to(sinks.dtype)


forward = register("attention", NativeKernel())
