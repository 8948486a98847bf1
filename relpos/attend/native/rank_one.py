"""The RankOne form in the kernel: running totals as sums of two floats, and weights (native/src/totals.cpp)."""

import ctypes

import torch
from torch import Tensor

from relpos.attend.native.library import Totals, constant, load
from relpos.attend.native.problem import Inputs, Keep
from relpos.forms.bias import RankOne
from relpos.forms.call import Call

FORM = "RANK_ONE"


def describe(form: RankOne, call: Call, inputs: Inputs) -> None:
    """Set step or total, and weight, (batch, heads, tokens) each: of the keys, and of queries that come after them."""
    shape = (inputs.q.shape[0], inputs.q.shape[1], form.total.shape[-1])
    if form.step is None:
        inputs.total = form.total.double().expand(shape)
    else:
        inputs.step = form.step.float().expand(shape)
    inputs.weight = None if form.weight is None else form.weight.float().expand(shape)
    inputs.symmetric = form.symmetric
    inputs.skip = inputs.skip and call.among_keys  # what may be skipped is bounded by the totals of the keys


def present(inputs: Inputs) -> bool:
    """Whether the inputs have this form."""
    return inputs.total is not None or inputs.step is not None


def fill(problem: ctypes.Structure, inputs: Inputs, keep: Keep) -> Tensor:
    """Set the running total and its weight, and return their units, which `gradients` needs."""
    tokens = inputs.total if inputs.step is None else inputs.step
    assert tokens is not None
    batch, heads, length = tokens.shape
    rows = keep(torch.empty(3, batch, heads, length + constant("ROW_PAD"), dtype=torch.float32))
    unit = torch.empty(batch, heads, dtype=torch.float64)
    total = None if inputs.total is None else inputs.total.contiguous()
    load().relpos_pack_totals(make_totals(total, inputs.step, inputs.weight, rows, unit))
    set_rows(problem, rows, inputs.weight is not None, inputs.symmetric)
    return unit


def make_totals(total: Tensor | None, step: Tensor | None, weight: Tensor | None, rows: Tensor, unit: Tensor) -> Totals:
    """The arguments of the functions of totals.cpp; the tensors must stay alive."""
    tokens = total if step is None else step
    assert tokens is not None
    totals = Totals(*tokens.shape, torch.get_num_threads())
    totals.rows, totals.plane_stride, totals.row_stride = rows.data_ptr(), rows.stride(0), rows.stride(2)
    totals.unit = unit.data_ptr()
    if total is not None:
        totals.total = total.data_ptr()
    if step is not None:
        totals.step, totals.step_strides = step.data_ptr(), step.stride()
    if weight is not None:
        totals.weight, totals.weight_strides = weight.data_ptr(), weight.stride()
    return totals


def set_rows(p: ctypes.Structure, rows: Tensor, weighted: bool, symmetric: bool) -> None:
    """Set the fields of the bias from packed totals, (3, batch, heads, tokens + pad)."""
    plane = rows.stride(0) * rows.element_size()
    p.total_high = rows.data_ptr()
    p.total_low, p.weight, p.total_stride = p.total_high + plane, p.total_high + 2 * plane, rows.stride(2)
    p.weighted, p.symmetric = weighted, symmetric


def buffers(inputs: Inputs, slots: int) -> dict[str, Tensor]:
    """Memory for the kernel's sums, by field."""
    rows = torch.empty(2, *inputs.q.shape[:3], dtype=torch.float32)
    of_keys = torch.zeros(*inputs.q.shape[:2], inputs.k.shape[2], dtype=torch.float64)
    sums = {"grad_total": of_keys, "grad_total_query": rows[0]}
    return sums if inputs.weight is None else sums | {"grad_weight": rows[1]}


def gradients(sums: dict[str, Tensor], inputs: Inputs, problem: ctypes.Structure, unit: Tensor) -> dict[str, Tensor]:
    """Gradients of the inputs of this form, from the kernel's sums."""
    totals = make_totals(inputs.total, inputs.step, inputs.weight, unit[None, ..., None], unit)
    totals.keys, totals.queries, totals.start = inputs.k.shape[2], inputs.q.shape[2], inputs.start
    totals.grad_keys, totals.grad_queries = sums["grad_total"].data_ptr(), sums["grad_total_query"].data_ptr()
    names = [name for name in ("total", "step", "weight") if getattr(inputs, name) is not None]
    grads = {name: torch.empty_like(getattr(inputs, name), memory_format=torch.contiguous_format) for name in names}
    for name, grad in grads.items():
        setattr(totals, f"grad_{name}", grad.data_ptr())
    if "weight" in grads:
        totals.grad_weights = sums["grad_weight"].data_ptr()
    load().relpos_unpack_gradients(totals)
    return grads
