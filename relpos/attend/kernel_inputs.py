"""Prepares tensors for the kernel: padded, scaled to base 2, and kept alive while it runs."""

import ctypes
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.attend import library
from relpos.attend.library import RANK_ONE, ROW_PAD, SCALED, TABLE_PAD, TOEPLITZ, Array, Problem
from relpos.encodings.call import document_ends

LOG2E = math.log2(math.e)
WORK_FOR_A_THREAD = 1 << 21  # multiplications of q·k, about 0.1 ms: starting a thread for less costs more than it saves
LARGEST_BIAS = 2.0**126  # in units of log2; larger ones, which float32 can hold in natural units, would overflow
REACH, HEAVIEST, LARGEST_REACH = 30, 60, 120  # exponents of running totals and weights as the kernel receives them


def form_number(bias: dict[str, Tensor]) -> int:
    """The kernel's number of the form that has these tensors."""
    return SCALED if "knot" in bias else TOEPLITZ * ("table" in bias) + RANK_ONE * ("total" in bias)


class Prepared:
    """A problem for the kernel, and the tensors it points to, kept alive."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: dict[str, Tensor], documents: Tensor | None,
        padding: Tensor | None, zero: int, causal: bool, symmetric: bool, scale: float, skip: bool,
    ) -> None:  # fmt: skip
        self.problem = p = Problem()
        self.kept: list[Tensor] = []
        self.unit: Tensor | None = None  # of the running totals: (batch, heads, 1)
        p.batch, p.heads, p.queries, p.head_dim = q.shape
        p.key_heads, p.keys = k.shape[1:3]
        p.causal, p.symmetric, p.scale, p.skip = causal, symmetric, scale, skip
        work = q.numel() * k.shape[2]
        p.threads = min(torch.get_num_threads(), 1 + work // WORK_FOR_A_THREAD)
        p.q, p.k, p.v = self.array(q), self.array(k), self.array(v)
        if documents is not None:
            first, end = (self.keep(x.int()) for x in document_ends(documents))
            p.first, p.end = first.data_ptr(), end.data_ptr()
        if padding is not None:
            p.padding = self.keep(padding.to(torch.uint8)).data_ptr()
        p.form = form_number(bias)
        if "table" in bias:
            self.set_table(bias["table"], zero, 1.0 if p.form == SCALED else LOG2E)
        if "total" in bias:
            p.weighted = "weight" in bias
            self.set_total(bias["total"], bias.get("weight"))
        if p.form == SCALED:
            self.set_scaled(bias)

    def keep(self, x: Tensor) -> Tensor:
        """The tensor, contiguous, kept alive as long as this object."""
        self.kept.append(x.contiguous())
        return self.kept[-1]

    def array(self, x: Tensor) -> Array:
        """The tensor as rows that the kernel can read, copied only if the rows are not contiguous."""
        if x.stride(-1) != 1:
            x = x.contiguous()
        self.kept.append(x)
        return Array.of(x)

    def set_table(self, table: Tensor, zero: int, unit: float) -> None:
        """Set the table over distances: one per head, or one for all heads."""
        p = self.problem
        padded = self.keep(F.pad((table * unit).clamp(max=LARGEST_BIAS), (TABLE_PAD, TABLE_PAD)))
        p.table, p.distances, p.zero = padded.data_ptr(), table.shape[-1], zero + TABLE_PAD
        p.table_stride = padded.shape[-1] if table.dim() == 2 else 0

    def set_total(self, total: Tensor, weight: Tensor | None) -> None:
        """Set the running total, minus its minimum and split into two floats, and its weight.

        Both are scaled per head by a power of two, so that neither overflows float32, and small differences of the
        total do not become denormal, which the kernel treats as 0.
        """
        p = self.problem
        weight = torch.ones_like(total) if weight is None else weight.double()
        least, largest = total.aminmax(dim=-1, keepdim=True)
        exponent = unit_exponent(largest - least, weight.abs().amax(dim=-1, keepdim=True))
        self.unit = power_of_two(exponent)
        scaled = (total - least) * power_of_two(-exponent)
        high = scaled.float()
        low = (scaled - high.double()).float()
        factor = (weight * (LOG2E * self.unit)).clamp(-LARGEST_BIAS, LARGEST_BIAS).float()
        high, low, factor = (self.keep(F.pad(x, (0, ROW_PAD))) for x in (high, low, factor))
        p.total_high, p.total_low, p.weight = high.data_ptr(), low.data_ptr(), factor.data_ptr()

    def set_scaled(self, bias: dict[str, Tensor]) -> None:
        """Set the hinges, with base and gain for a strip that lies beyond some of them."""
        p = self.problem
        knot, base, gain, bend = bias["knot"].float(), bias["base"], bias["gain"], bias["bend"]
        # Base and gain for each number of knots already passed.
        passed_base = base[:, None] - F.pad((bend * knot.double()).cumsum(1), (1, 0))  # (heads, knots + 1)
        passed_gain = gain[:, None] + F.pad(bend.cumsum(1), (1, 0))
        numbers = [knot, *((x * LOG2E).float() for x in (passed_base, passed_gain, bend))]
        p.knots = len(knot)
        p.knot, p.base, p.gain, p.bend = (self.keep(x).data_ptr() for x in numbers)
        rows = self.keep(F.pad(bias["inverse"].float(), (0, ROW_PAD)))
        p.inverse, p.inverse_stride = rows.data_ptr(), rows.shape[1] if rows.shape[0] > 1 else 0

    def run(self, function: str) -> None:
        """Call the kernel; other Python threads run meanwhile."""
        if getattr(library.load(), function)(ctypes.byref(self.problem)):
            raise MemoryError("the native attention kernel could not allocate memory for its tiles.")


def unit_exponent(reach: Tensor, heaviest: Tensor) -> Tensor:
    """Exponent of the unit for a running total that spans `reach` and whose largest weight is `heaviest`.

    The total then spans about 2^REACH, unless the weight would leave the range 2^−HEAVIEST … 2^HEAVIEST; and never
    more than 2^LARGEST_REACH.
    """
    spans, weighs = (torch.frexp(x).exponent.long() for x in (reach, heaviest))
    return (spans - REACH).clamp(-HEAVIEST - weighs, HEAVIEST - weighs).maximum(spans - LARGEST_REACH)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float64, exactly."""
    return ((exponent + 1023) << 52).view(torch.float64)
