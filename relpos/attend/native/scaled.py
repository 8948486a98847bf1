"""The Scaled form in the kernel: a piecewise-linear function of a table over distances times one factor per query."""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.attend.native import toeplitz
from relpos.attend.native.library import constant
from relpos.attend.native.problem import Inputs, Keep, columns
from relpos.attend.native.toeplitz import LOG2E
from relpos.attend.piecewise import hinges
from relpos.forms.bias import Scaled
from relpos.forms.call import Call

FORM = "SCALED"


def describe(form: Scaled, call: Call, inputs: Inputs) -> None:
    """Set the table, (distances,), the factor of each query, (1 or batch, queries), and the hinges."""
    inputs.inverse = 1.0 / form.row.double()
    inputs.knot, inputs.base, inputs.gain, inputs.bend = hinges(form, inputs.inverse)
    zero, distances = columns(call)
    # The distance of a key after the query counts as 0.
    column = (torch.arange(distances) - zero).clamp(0, len(form.table) - 1)
    inputs.table = form.table.float() if len(form.table) == distances and zero == 0 else form.table.float()[column]


def present(inputs: Inputs) -> bool:
    """Whether the inputs have this form."""
    return inputs.knot is not None


def fill(problem: ctypes.Structure, inputs: Inputs, keep: Keep) -> None:
    """Set the table and the hinges, with base and gain for a strip that lies beyond some of them."""
    p = problem
    table, inverse, knot, base, gain, bend = _tensors(inputs)
    toeplitz.set_table(p, table, inputs.zero, keep)
    knot = knot.float()
    # Base and gain for each number of knots already passed.
    passed_base = base[:, None] - F.pad((bend * knot.double()).cumsum(1), (1, 0))  # (heads, knots + 1)
    passed_gain = gain[:, None] + F.pad(bend.cumsum(1), (1, 0))
    numbers = [knot, *((x * LOG2E).float() for x in (passed_base, passed_gain, bend))]
    p.knots = len(knot)
    p.knot, p.base, p.gain, p.bend = (keep(x).data_ptr() for x in numbers)
    rows = keep(F.pad(inverse.float(), (0, constant("ROW_PAD"))))
    p.inverse, p.inverse_stride = rows.data_ptr(), rows.shape[1] if rows.shape[0] > 1 else 0


def buffers(inputs: Inputs, slots: int) -> dict[str, Tensor]:
    """Memory for the kernel's sums, by field."""
    _, _, knot, _, _, _ = _tensors(inputs)
    batch, heads, queries, _ = inputs.q.shape
    return toeplitz.buffers(inputs, slots) | {
        "grad_inverse": torch.empty(batch, heads, queries, dtype=torch.float32),
        "grad_scaled_sums": torch.zeros(slots, heads, 4, len(knot) + 1, dtype=torch.float64),
    }


def gradients(
    sums: dict[str, Tensor], inputs: Inputs, problem: ctypes.Structure, filled: None = None
) -> dict[str, Tensor]:
    """Gradients of the inputs of this form, from the kernel's sums (native/src/scaled.h)."""
    _, inverse, knot, _, _, bend = _tensors(inputs)
    by_batch = sums["grad_inverse"].double().sum(1)  # (batch, queries)
    plain, times_x, above, passed = sums["grad_scaled_sums"].sum(0).unbind(1)  # (heads, knots + 1) each
    # The gradient of a knot from strips that lie entirely beyond it.
    later_plain, later_x = (x.flip(1).cumsum(1).flip(1)[:, 1:] for x in (plain, times_x))
    return toeplitz.gradients(sums, inputs, problem) | {
        "inverse": by_batch if len(inverse) > 1 else by_batch.sum(0, keepdim=True),
        "base": plain.sum(1) if moves_with_a_constant(problem) else torch.zeros(len(plain), dtype=torch.float64),
        "gain": times_x.sum(1),
        "bend": above[:, :-1] + later_x - knot * later_plain,
        "knot": -(bend * (passed[:, :-1] + later_plain)).sum(0),
    }


def moves_with_a_constant(problem: ctypes.Structure) -> bool:
    """Whether a constant added to all logits changes anything. If not, the kernel's sum for it is rounding error."""
    return problem.sinks is not None or problem.grad_lse is not None


def _tensors(inputs: Inputs) -> tuple[Tensor, ...]:
    tensors = (inputs.table, inputs.inverse, inputs.knot, inputs.base, inputs.gain, inputs.bend)
    assert all(x is not None for x in tensors)
    return tensors  # type: ignore[return-value]
