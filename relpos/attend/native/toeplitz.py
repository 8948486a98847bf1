"""The Toeplitz form in the kernel: a table over distances, times log2(e), padded on both sides."""

import ctypes
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.attend.native.library import constant
from relpos.attend.native.problem import Inputs, Keep, columns
from relpos.forms.bias import Toeplitz
from relpos.forms.call import Call

FORM = "TOEPLITZ"
LOG2E = math.log2(math.e)
LARGEST_BIAS = 2.0**126  # in units of log2; larger ones, which float32 can hold in natural units, would overflow


def describe(form: Toeplitz, call: Call, inputs: Inputs) -> None:
    """Set the table over the distances of the call, (heads, distances); several tables are added."""
    zero, distances = columns(call)
    table = form.table.float()
    if table.shape[1] != distances or form.zero != zero:
        column = torch.arange(distances) - zero + form.zero
        table = table[:, column.clamp(0, table.shape[1] - 1)]
    inputs.table = table if inputs.table is None else inputs.table + table


def present(inputs: Inputs) -> bool:
    """Whether the inputs have this form."""
    return inputs.table is not None and inputs.knot is None


def fill(problem: ctypes.Structure, inputs: Inputs, keep: Keep) -> None:
    """Set the fields of the problem."""
    assert inputs.table is not None
    set_table(problem, (inputs.table * LOG2E).clamp(max=LARGEST_BIAS), inputs.zero, keep)


def set_table(p: ctypes.Structure, table: Tensor, zero: int, keep: Keep) -> None:
    """Set a table over distances: one per head, (heads, distances), or one for all heads, (distances,)."""
    pad = constant("TABLE_PAD")
    padded = keep(F.pad(table, (pad, pad)))
    p.table, p.distances, p.zero = padded.data_ptr(), table.shape[-1], zero + pad
    p.table_stride = padded.shape[-1] if table.dim() == 2 else 0


def buffers(inputs: Inputs, slots: int) -> dict[str, Tensor]:
    """Memory for the kernel's sums, by field."""
    assert inputs.table is not None
    padded = inputs.table.shape[-1] + 2 * constant("TABLE_PAD")
    return {"grad_table": torch.zeros(slots, inputs.q.shape[1], padded, dtype=torch.float32)}


def gradients(
    sums: dict[str, Tensor], inputs: Inputs, problem: ctypes.Structure, filled: None = None
) -> dict[str, Tensor]:
    """Gradients of the inputs of this form, from the kernel's sums."""
    assert inputs.table is not None
    pad = constant("TABLE_PAD")
    by_head = sums["grad_table"].sum(0)[:, pad:-pad]  # (heads, distances)
    return {"table": by_head.contiguous() if inputs.table.dim() == 2 else by_head.sum(0)}
