"""The kernel as torch operators: `relpos::attention` and its backward, with fake versions for tracing and autograd."""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.attend import library
from relpos.attend.kernel_inputs import Prepared, form_number
from relpos.attend.library import RANK_ONE, SUM, TABLE_PAD, TILE, TOEPLITZ, Array

COUNTS = 4  # per head: open, visible, scored, kept
BIAS = ("table", "total", "weight", "inverse", "knot", "base", "gain", "bend")

_last_counts: Tensor | None = None


def skipped_fraction() -> float:
    """Share of the visible tiles that the last forward, in any thread, did not compute."""
    counts = _last_counts
    if counts is None:
        return 0.0
    visible, scored = counts[:, 1].sum().item(), counts[:, 2].sum().item()
    return 1.0 - scored / visible if visible else 0.0


def by_name(*tensors: Tensor | None) -> dict[str, Tensor]:
    """The tensors of the bias that are not None, by name."""
    return {name: x for name, x in zip(BIAS, tensors, strict=True) if x is not None}


def skipping_size(q: Tensor, k: Tensor, bias: dict[str, Tensor], skip: bool) -> int:
    """Length of the record of skipped tiles, in 64-bit words."""
    heads, keys = q.shape[0] * q.shape[1], k.shape[2]
    if not skip or form_number(bias) not in (TOEPLITZ, RANK_ONE, SUM):
        return 0
    key_blocks = (keys + TILE - 1) // TILE
    query_blocks = key_blocks - (keys - q.shape[2]) // TILE
    return heads * COUNTS + (heads * query_blocks * key_blocks + 7) // 8  # one byte per tile


def empty_out(q: Tensor) -> Tensor:
    """An empty output, laid out so that merging the heads copies nothing."""
    batch, heads, queries, head_dim = q.shape
    return q.new_empty(batch, queries, heads, head_dim).transpose(1, 2)


@torch.library.custom_op("relpos::attention", mutates_args=())
def forward(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, total: Tensor | None, weight: Tensor | None,
    inverse: Tensor | None, knot: Tensor | None, base: Tensor | None, gain: Tensor | None, bend: Tensor | None,
    documents: Tensor | None, padding: Tensor | None, zero: int, causal: bool, symmetric: bool, scale: float,
    skip: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return output (batch, heads, queries, head_dim), log-sum-exp (2, batch, heads, queries) and record of skipping.

    The log-sum-exp has base 2 and two parts: the largest score of a row, and the logarithm of the remaining sum.
    """
    global _last_counts  # noqa: PLW0603
    bias = by_name(table, total, weight, inverse, knot, base, gain, bend)
    prepared = Prepared(q, k, v, bias, documents, padding, zero, causal, symmetric, scale, skip)
    p = prepared.problem
    out, lse = empty_out(q), q.new_empty(2, *q.shape[:3])
    skipping = torch.zeros(skipping_size(q, k, bias, skip), dtype=torch.int64)
    p.out, p.lse, p.skipping = Array.of(out), lse.data_ptr(), skipping.data_ptr() or None
    prepared.run("relpos_forward")
    heads = q.shape[0] * q.shape[1]
    _last_counts = skipping[: heads * COUNTS].view(heads, COUNTS).clone() if len(skipping) else None
    return out, lse, skipping


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    bias, skip = by_name(*rest[: len(BIAS)]), rest[-1]
    skipping = q.new_empty(skipping_size(q, k, bias, skip), dtype=torch.int64)
    return empty_out(q), q.new_empty(2, *q.shape[:3]), skipping


@torch.library.custom_op("relpos::attention_backward", mutates_args=())
def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, skipping: Tensor,
    table: Tensor | None, total: Tensor | None, weight: Tensor | None,
    inverse: Tensor | None, knot: Tensor | None, base: Tensor | None, gain: Tensor | None, bend: Tensor | None,
    documents: Tensor | None, padding: Tensor | None, zero: int, causal: bool, symmetric: bool, scale: float,
    learns: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v and, if `learns`, of the tensors of the bias in the order of BIAS (empty where None)."""
    bias = by_name(table, total, weight, inverse, knot, base, gain, bend)
    prepared = Prepared(q, k, v, bias, documents, padding, zero, causal, symmetric, scale, len(skipping) > 0)
    p = prepared.problem
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    p.grad_q, p.grad_k, p.grad_v = (Array.of(x) for x in grads)
    p.grad_out, p.out, p.lse = prepared.array(grad), prepared.array(out), prepared.keep(lse).data_ptr()
    p.skipping = prepared.keep(skipping).data_ptr() or None
    if not learns:
        prepared.run("relpos_backward")
        return grads
    slots = library.load().relpos_slots(ctypes.byref(p))
    heads, rows = q.shape[1], tuple(q.shape[:3])
    buffers: dict[str, Tensor] = {}
    if table is not None:
        buffers["grad_table"] = q.new_zeros(slots, heads, table.shape[-1] + 2 * TABLE_PAD)
    if total is not None:
        buffers["grad_total"] = torch.zeros(total.shape, dtype=torch.float64)
        buffers["grad_total_query"] = q.new_empty(rows)
        if weight is not None:
            buffers["grad_weight"] = q.new_empty(rows)
    if knot is not None:
        buffers["grad_inverse"] = q.new_empty(rows)
        buffers["grad_scaled_sums"] = torch.zeros(slots, heads, 4, len(knot) + 1, dtype=torch.float64)
    for name, x in buffers.items():
        setattr(p, name, x.data_ptr())
    prepared.run("relpos_backward")
    gradients = bias_gradients(buffers, bias, k.shape[2], prepared.unit)
    return grads + [gradients.get(name, q.new_empty(0)) for name in BIAS]


def bias_gradients(
    buffers: dict[str, Tensor], bias: dict[str, Tensor], keys: int, unit: Tensor | None
) -> dict[str, Tensor]:
    """Gradients of the tensors of the bias, computed from the kernel's sums."""
    gradients: dict[str, Tensor] = {}

    def at_queries(x: Tensor) -> Tensor:
        return F.pad(x, (keys - x.shape[-1], 0))  # the queries are the last positions

    if "grad_table" in buffers:
        by_head = buffers["grad_table"].sum(0)[:, TABLE_PAD:-TABLE_PAD]  # (heads, distances)
        gradients["table"] = by_head.contiguous() if bias["table"].dim() == 2 else by_head.sum(0)
    if "grad_total" in buffers:
        assert unit is not None  # the kernel counts the total in multiples of `unit`
        gradients["total"] = (buffers["grad_total"] + at_queries(buffers["grad_total_query"])) / unit
        if "grad_weight" in buffers:
            gradients["weight"] = (at_queries(buffers["grad_weight"]) * unit).float()
    if "grad_scaled_sums" in buffers:
        knot, bend = bias["knot"], bias["bend"]
        by_batch = at_queries(buffers["grad_inverse"].double().sum(1))  # (batch, keys)
        gradients["inverse"] = by_batch if len(bias["inverse"]) > 1 else by_batch.sum(0, keepdim=True)
        plain, times_x, above, passed = buffers["grad_scaled_sums"].sum(0).unbind(1)  # (heads, knots + 1) each
        # A constant moves no weight: the kernel's sum for it is rounding error.
        gradients["base"], gradients["gain"] = torch.zeros(len(plain), dtype=torch.float64), times_x.sum(1)
        # The gradient of a knot from strips that lie entirely beyond it.
        later_plain, later_x = (x.flip(1).cumsum(1).flip(1)[:, 1:] for x in (plain, times_x))
        gradients["bend"] = above[:, :-1] + later_x - knot * later_plain
        gradients["knot"] = -(bend * (passed[:, :-1] + later_plain)).sum(0)
    return gradients


@backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, skipping: Tensor, *rest: Any
) -> list[Tensor]:
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    if not rest[-1]:
        return grads
    return grads + [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in rest[: len(BIAS)]]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, zero, causal, symmetric, scale, _ = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.options = (zero, causal, symmetric, scale)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """Gradients for every argument of `forward`."""
    rest = 2 + 5  # documents and padding, and the options
    if grad is None:
        return (None,) * (3 + len(BIAS) + rest)
    *tensors, out, lse, skipping = ctx.saved_tensors
    q, k, v, *others = tensors
    learns = any(ctx.needs_input_grad[3 : 3 + len(BIAS)])
    grads = backward(grad, q, k, v, out, lse, skipping, *others, *ctx.options, learns)
    bias = [x if needed else None for x, needed in zip(grads[3:], ctx.needs_input_grad[3:], strict=False)]
    return (*grads[:3], *(bias or [None] * len(BIAS)), *[None] * rest)


def _refuse_second_derivatives(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "the native kernel has first derivatives only: for second derivatives pass backend='reference' or 'chunks'."
    )


forward.register_autograd(_differentiate, setup_context=_setup)
backward.register_autograd(_refuse_second_derivatives, setup_context=lambda ctx, inputs, output: None)
