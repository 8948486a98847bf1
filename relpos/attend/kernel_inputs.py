"""Brings tensors into the shape the kernel reads: padded, scaled to base 2, and kept alive while it runs."""

import ctypes
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.attend import library
from relpos.attend.library import RANK_ONE, ROW_PAD, SCALED, TABLE_PAD, TOEPLITZ, Array, Problem

LOG2E = math.log2(math.e)
WORK_FOR_A_THREAD = 1 << 21  # multiplications of q·k, about 0.1 ms: waking a thread for less does not pay


def form_number(bias: dict[str, Tensor]) -> int:
    """The kernel's number of the form whose numbers are given."""
    return SCALED if "knot" in bias else TOEPLITZ * ("table" in bias) + RANK_ONE * ("total" in bias)


class Prepared:
    """A problem for the kernel, and the tensors it points to, kept alive."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: dict[str, Tensor], documents: Tensor | None,
        padding: Tensor | None, zero: int, causal: bool, symmetric: bool, scale: float, skip: bool,
    ) -> None:  # fmt: skip
        self.problem = p = Problem()
        self.kept: list[Tensor] = []
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
            self.set_total(bias["total"], bias.get("weight"))
        if p.form == SCALED:
            self.set_scaled(bias)

    def keep(self, x: Tensor) -> Tensor:
        """The tensor, contiguous, for as long as this lives."""
        self.kept.append(x.contiguous())
        return self.kept[-1]

    def array(self, x: Tensor) -> Array:
        """The tensor as rows the kernel can read, copied only if they are not contiguous themselves."""
        if x.stride(-1) != 1:
            x = x.contiguous()
        self.kept.append(x)
        return Array.of(x)

    def set_table(self, table: Tensor, zero: int, unit: float) -> None:
        """A table over distances, one a head or one for all."""
        p = self.problem
        padded = self.keep(F.pad(table * unit, (TABLE_PAD, TABLE_PAD)))
        p.table, p.distances, p.zero = padded.data_ptr(), table.shape[-1], zero + TABLE_PAD
        p.table_stride = padded.shape[-1] if table.dim() == 2 else 0

    def set_total(self, total: Tensor, weight: Tensor | None) -> None:
        """A running total, split into two floats each, and its weight."""
        p = self.problem
        high = total.float()
        low = (total - high.double()).float()
        factor = torch.full_like(high, LOG2E) if weight is None else weight * LOG2E
        high, low, factor = (self.keep(F.pad(x, (0, ROW_PAD))) for x in (high, low, factor))
        p.total_high, p.total_low, p.weight = high.data_ptr(), low.data_ptr(), factor.data_ptr()

    def set_scaled(self, bias: dict[str, Tensor]) -> None:
        """The hinges, with what a strip needs that has passed some of them."""
        p = self.problem
        knot, base, gain, bend = bias["knot"].float(), bias["base"], bias["gain"], bias["bend"]
        # Base and gain for every number of knots already passed.
        passed_base = base[:, None] - F.pad((bend * knot.double()).cumsum(1), (1, 0))  # (heads, knots + 1)
        passed_gain = gain[:, None] + F.pad(bend.cumsum(1), (1, 0))
        numbers = [knot, *((x * LOG2E).float() for x in (passed_base, passed_gain, bend))]
        p.knots = len(knot)
        p.knot, p.base, p.gain, p.bend = (self.keep(x).data_ptr() for x in numbers)
        rows = self.keep(F.pad(bias["inverse"].float(), (0, ROW_PAD)))
        p.inverse, p.inverse_stride = rows.data_ptr(), rows.shape[1] if rows.shape[0] > 1 else 0

    def run(self, function: str) -> None:
        """Call the kernel; other Python threads go on meanwhile."""
        if getattr(library.load(), function)(ctypes.byref(self.problem)):
            raise MemoryError("the native attention kernel found no memory for its tiles.")


def document_ends(documents: Tensor) -> tuple[Tensor, Tensor]:
    """The first key and one past the last key of the document of every token: (batch, keys) each."""
    keys = documents.shape[1]
    index = torch.arange(keys).expand_as(documents)
    changes = documents[:, 1:] != documents[:, :-1]
    starts, ends = F.pad(changes, (1, 0), value=True), F.pad(changes, (0, 1), value=True)
    first = torch.where(starts, index, 0).cummax(1).values
    last = torch.where(ends, index, keys).flip(1).cummin(1).values.flip(1)
    return first, last + 1
