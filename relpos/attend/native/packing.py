"""The bias in the kernel's layout: how each form is packed, and its gradients read from the kernel's sums.

Each form has one class: an instance packs the inputs of a form into a problem. `PackedBias` and `RunningTotals` stay
packed between decoding steps.
"""

import ctypes
import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.attend.kernel_inputs import Inputs, describe
from relpos.attend.native.library import Totals, constant, load
from relpos.attend.native.problem import Fields
from relpos.attend.piecewise import after_knots, hinge_gradients
from relpos.forms.bias import Form
from relpos.forms.call import Call

LOG2E = math.log2(math.e)
LARGEST_BIAS = 2.0**126  # in units of log2; larger ones, which float32 can hold in natural units, would overflow


class Packing:
    """A form of the bias, packed into a problem.

    `present` finds the form in the inputs, `fill` sets the fields of the problem, `buffers` is memory for the kernel's
    sums by field, and `gradients` are those of the inputs, from these sums.
    """

    form: ClassVar[str]  # its constant in api.h
    skips: ClassVar[bool] = True  # whether tiles may be left out with it

    def __init__(self, inputs: Inputs, problem: Fields) -> None:
        self.inputs, self.problem = inputs, problem
        self.fill(problem.fields)
        problem.fields.form |= constant(self.form)  # the number of a sum is made of the bits of its terms

    def fill(self, p: Any) -> None:
        """Set the fields of the problem."""
        raise NotImplementedError


class TablePacking(Packing):
    """Toeplitz: a table over distances, times log2(e), padded on both sides."""

    form = "TOEPLITZ"

    @staticmethod
    def present(inputs: Inputs) -> bool:
        return inputs.table is not None

    def fill(self, p: Any) -> None:
        assert self.inputs.table is not None
        self.set_table(p, (self.inputs.table * LOG2E).clamp(max=LARGEST_BIAS))

    def set_table(self, p: Any, table: Tensor) -> None:
        """Set a table over distances: one per head, (heads, distances), or one for all heads, (distances,)."""
        pad = constant("TABLE_PAD")
        padded = self.problem.keep(F.pad(table, (pad, pad)))
        p.table, p.distances, p.zero = padded.data_ptr(), table.shape[-1], self.inputs.zero + pad
        p.table_stride = padded.shape[-1] if table.dim() == 2 else 0

    @property
    def columns(self) -> int:
        """Columns of the padded table."""
        assert self.inputs.table is not None
        return self.inputs.table.shape[-1] + 2 * constant("TABLE_PAD")

    def buffers(self, slots: int) -> dict[str, Tensor]:
        return {"grad_table": torch.zeros(slots, self.inputs.q.shape[1], self.columns, dtype=torch.float32)}

    def gradients(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"table": self.by_head(sums).contiguous()}

    def by_head(self, sums: dict[str, Tensor]) -> Tensor:
        """The kernel's sums per distance, (heads, distances)."""
        pad = constant("TABLE_PAD")
        return sums["grad_table"].sum(0)[:, pad:-pad]


class TotalsPacking(Packing):
    """RankOne: running totals as sums of two floats, and weights (native/src/totals.cpp)."""

    form = "RANK_ONE"

    @staticmethod
    def present(inputs: Inputs) -> bool:
        return inputs.total is not None or inputs.step is not None

    def fill(self, p: Any) -> None:
        tokens = self.inputs.total if self.inputs.step is None else self.inputs.step
        assert tokens is not None
        batch, heads, length = tokens.shape
        rows = self.problem.keep(torch.empty(3, batch, heads, length + constant("ROW_PAD"), dtype=torch.float32))
        self.unit = torch.empty(batch, heads, dtype=torch.float64)
        total = None if self.inputs.total is None else self.inputs.total.contiguous()
        load().relpos_pack_totals(make_totals(total, self.inputs.step, self.inputs.weight, rows, self.unit))
        set_rows(p, rows, self.inputs.weight is not None, self.inputs.symmetric)

    def buffers(self, slots: int) -> dict[str, Tensor]:
        rows = torch.empty(2, *self.inputs.q.shape[:3], dtype=torch.float32)
        of_keys = torch.zeros(*self.inputs.q.shape[:2], self.inputs.k.shape[2], dtype=torch.float64)
        sums = {"grad_total": of_keys, "grad_total_query": rows[0]}
        return sums if self.inputs.weight is None else sums | {"grad_weight": rows[1]}

    def gradients(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs, unit = self.inputs, self.unit
        totals = make_totals(inputs.total, inputs.step, inputs.weight, unit[None, ..., None], unit)
        totals.keys, totals.queries, totals.start = inputs.k.shape[2], inputs.q.shape[2], inputs.start
        totals.grad_keys, totals.grad_queries = sums["grad_total"].data_ptr(), sums["grad_total_query"].data_ptr()
        tensors = {"total": inputs.total, "step": inputs.step, "weight": inputs.weight}
        grads = {
            name: torch.empty_like(x, memory_format=torch.contiguous_format)
            for name, x in tensors.items()
            if x is not None
        }
        for name, grad in grads.items():
            setattr(totals, f"grad_{name}", grad.data_ptr())
        if "weight" in grads:
            totals.grad_weights = sums["grad_weight"].data_ptr()
        load().relpos_unpack_gradients(totals)
        return grads


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


def set_rows(p: Any, rows: Tensor, weighted: bool, symmetric: bool) -> None:
    """Set the fields of the bias from packed totals, (3, batch, heads, tokens + pad)."""
    plane = rows.stride(0) * rows.element_size()
    p.total_high = rows.data_ptr()
    p.total_low, p.weight, p.total_stride = p.total_high + plane, p.total_high + 2 * plane, rows.stride(2)
    p.weighted, p.symmetric = weighted, symmetric


class HingePacking(TablePacking):
    """Scaled: a piecewise-linear function of a table over distances times one factor per query."""

    form = "SCALED"
    skips = False

    @staticmethod
    def present(inputs: Inputs) -> bool:
        return inputs.knot is not None

    def _tensors(self) -> tuple[Tensor, ...]:
        inputs = self.inputs
        tensors = (inputs.curve, inputs.inverse, inputs.knot, inputs.base, inputs.gain, inputs.bend)
        assert all(x is not None for x in tensors)
        return tensors  # type: ignore[return-value]

    def fill(self, p: Any) -> None:
        table, inverse, knot, base, gain, bend = self._tensors()
        self.set_table(p, table)
        knot, keep = knot.float(), self.problem.keep
        numbers = [knot, *((x * LOG2E).float() for x in (*after_knots(knot.double(), base, gain, bend), bend))]
        p.knots = len(knot)
        p.knot, p.base, p.gain, p.bend = (keep(x).data_ptr() for x in numbers)
        rows = keep(F.pad(inverse.float(), (0, constant("ROW_PAD"))))
        p.inverse, p.inverse_stride = rows.data_ptr(), rows.shape[1] if rows.shape[0] > 1 else 0

    def buffers(self, slots: int) -> dict[str, Tensor]:
        _, _, knot, _, _, _ = self._tensors()
        batch, heads, queries, _ = self.inputs.q.shape
        return super().buffers(slots) | {
            "grad_inverse": torch.empty(batch, heads, queries, dtype=torch.float32),
            "grad_scaled_sums": torch.zeros(slots, heads, 4, len(knot) + 1, dtype=torch.float64),
        }

    @property
    def columns(self) -> int:
        return len(self._tensors()[0]) + 2 * constant("TABLE_PAD")

    def gradients(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients from the kernel's sums (native/src/scaled.h)."""
        _, inverse, knot, _, _, bend = self._tensors()
        p: Any = self.problem.fields
        by_batch = sums["grad_inverse"].double().sum(1)  # (batch, queries)
        # A constant added to all logits changes nothing without these: the kernel's sum for it is rounding error.
        constant_matters = p.sinks is not None or p.grad_lse is not None
        return {
            "curve": self.by_head(sums).sum(0),
            "inverse": by_batch if len(inverse) > 1 else by_batch.sum(0, keepdim=True),
        } | hinge_gradients(sums["grad_scaled_sums"].sum(0), knot, bend, constant_matters)


Kind = type[TablePacking | TotalsPacking]
PACKINGS: tuple[Kind, ...] = (TablePacking, TotalsPacking, HingePacking)


def kinds(inputs: Inputs) -> list[Kind]:
    """The forms that the inputs have."""
    return [kind for kind in PACKINGS if kind.present(inputs)]


class PackedBias(Fields):
    """A bias that does not depend on the input, in causal attention, for all tokens below a capacity.

    The form has as many queries and keys as the capacity, and `native.refuses_call` has not refused it.
    """

    def __init__(self, form: Form, capacity: int) -> None:
        super().__init__()
        nothing = torch.empty(0)
        inputs = Inputs(nothing, nothing, nothing)
        describe(form, Call(capacity, capacity), inputs)
        for kind in kinds(inputs):
            kind(inputs, self)
        values = {item[0]: getattr(self.fields, item[0]) for item in self.fields._fields_}
        self.values = {name: value for name, value in values.items() if isinstance(value, int | float) and value}

    @property
    def scaled(self) -> bool:
        """Whether there is one factor per position, so that positions must not restart."""
        return "knots" in self.values

    def fill(self, p: Any) -> None:
        """Set the fields of the bias."""
        for name, value in self.values.items():
            setattr(p, name, value)
        if p.inverse:
            p.inverse += p.start * ctypes.sizeof(ctypes.c_float)  # one factor per query, from the first one on


class RunningTotals:
    """A RankOne bias that grows with every decoded token, by steps and weights (batch, heads, tokens).

    The unit of the totals is the one that suited the first tokens. If later ones leave its range, `append` says so, and
    the totals must be packed again.
    """

    def __init__(self, step: Tensor, weight: Tensor | None, capacity: int) -> None:
        self.capacity, self.length, self.weighted = capacity, step.shape[2], weight is not None
        # high, low and weight: (3, batch, heads, capacity + pad)
        self.rows = torch.empty(3, *step.shape[:2], capacity + constant("ROW_PAD"), dtype=torch.float32)
        self.unit = torch.empty(step.shape[:2], dtype=torch.float64)
        answer = load().relpos_pack_totals(make_totals(None, step, weight, self.rows, self.unit))
        self.fits = bool(answer == constant("OK"))  # whether all numbers are finite

    def append(self, step: Tensor, weight: Tensor | None) -> bool:
        """Add tokens, and return whether there was room and the numbers are in the range of the unit."""
        first, self.length = self.length, self.length + step.shape[2]
        if self.length > self.capacity:
            return False
        answer = load().relpos_append_totals(make_totals(None, step, weight, self.rows, self.unit), first)
        return bool(answer == constant("OK"))

    def crop(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        self.length = min(self.length, length)

    def fill(self, p: Any) -> None:
        """Set the fields of the bias."""
        p.form = constant("RANK_ONE")
        set_rows(p, self.rows, self.weighted, symmetric=False)
