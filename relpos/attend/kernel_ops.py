"""The kernel as torch operators: `relpos::attention` and its backward, with what tracing and autograd need."""

import ctypes
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.attend import library
from relpos.attend.library import RANK_ONE, ROW_PAD, SCALED, SUM, TABLE_PAD, TILE, TOEPLITZ, Array, Problem

LOG2E = math.log2(math.e)
COUNTS = 4  # of a head: open, visible, scored, kept
BIAS = ("table", "total", "weight", "inverse", "knot", "base", "gain", "bend")

_last_counts: Tensor | None = None


def skipped_fraction() -> float:
    """Of the tiles that the last forward could see, how many were never computed. Not kept apart by thread."""
    counts = _last_counts
    if counts is None:
        return 0.0
    visible, scored = counts[:, 1].sum().item(), counts[:, 2].sum().item()
    return 1.0 - scored / visible if visible else 0.0


class Prepared:
    """A problem for the kernel, and the tensors it points to, kept alive."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: dict[str, Tensor | None], documents: Tensor | None,
        padding: Tensor | None, zero: int, causal: bool, symmetric: bool, scale: float, skip: bool,
    ) -> None:  # fmt: skip
        self.problem = p = Problem()
        self.kept: list[Tensor] = []
        p.batch, p.heads, p.queries, p.head_dim = q.shape
        p.key_heads, p.keys = k.shape[1:3]
        p.causal, p.symmetric, p.scale, p.skip = causal, symmetric, scale, skip
        p.threads = torch.get_num_threads()
        p.q, p.k, p.v = self.array(q), self.array(k), self.array(v)
        if documents is not None:
            first, end = (self.keep(x.int()) for x in document_ends(documents))
            p.first, p.end = first.data_ptr(), end.data_ptr()
        if padding is not None:
            p.padding = self.keep(padding.to(torch.uint8)).data_ptr()
        table, total, inverse = bias["table"], bias["total"], bias["inverse"]
        p.form = SCALED if inverse is not None else TOEPLITZ * (table is not None) + RANK_ONE * (total is not None)
        if table is not None:
            self.set_table(table, zero, 1.0 if inverse is not None else LOG2E)
        if total is not None:
            self.set_total(total, bias["weight"])
        if inverse is not None:
            self.set_scaled(inverse, bias)

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
        p = self.problem
        padded = self.keep(F.pad(table * unit, (TABLE_PAD, TABLE_PAD)))
        p.table, p.distances, p.zero = padded.data_ptr(), table.shape[-1], zero + TABLE_PAD
        p.table_stride = padded.shape[-1] if table.dim() == 2 else 0

    def set_total(self, total: Tensor, weight: Tensor | None) -> None:
        p = self.problem
        high = total.float()
        low = (total - high.double()).float()
        factor = torch.full_like(high, LOG2E) if weight is None else weight * LOG2E
        high, low, factor = (self.keep(F.pad(x, (0, ROW_PAD))) for x in (high, low, factor))
        p.total_high, p.total_low, p.weight = high.data_ptr(), low.data_ptr(), factor.data_ptr()

    def set_scaled(self, inverse: Tensor, bias: dict[str, Tensor | None]) -> None:
        p = self.problem
        knot, base, gain, bend = (bias[name] for name in ("knot", "base", "gain", "bend"))
        assert knot is not None and base is not None and gain is not None and bend is not None
        knot = knot.float()
        # Base and gain for every number of knots already passed.
        passed_base = base[:, None] - F.pad((bend * knot.double()).cumsum(1), (1, 0))  # (heads, knots + 1)
        passed_gain = gain[:, None] + F.pad(bend.cumsum(1), (1, 0))
        numbers = [knot, *((x * LOG2E).float() for x in (passed_base, passed_gain, bend))]
        p.knots = len(knot)
        p.knot, p.base, p.gain, p.bend = (self.keep(x).data_ptr() for x in numbers)
        rows = self.keep(F.pad(inverse.float(), (0, ROW_PAD)))
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


def skipping_size(q: Tensor, k: Tensor, form: bool) -> int:
    """Words of the record of what was skipped."""
    heads, keys = q.shape[0] * q.shape[1], k.shape[2]
    if not form:
        return 0
    key_blocks = (keys + TILE - 1) // TILE
    query_blocks = key_blocks - (keys - q.shape[2]) // TILE
    return heads * (COUNTS + query_blocks * ((key_blocks + 63) // 64))


def empty_out(q: Tensor) -> Tensor:
    """Room for the output, laid out so that merging the heads copies nothing."""
    batch, heads, queries, head_dim = q.shape
    return q.new_empty(batch, queries, heads, head_dim).transpose(1, 2)


@torch.library.custom_op("relpos::attention", mutates_args=())
def forward(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, total: Tensor | None, weight: Tensor | None,
    inverse: Tensor | None, knot: Tensor | None, base: Tensor | None, gain: Tensor | None, bend: Tensor | None,
    documents: Tensor | None, padding: Tensor | None, zero: int, causal: bool, symmetric: bool, scale: float,
    skip: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output (batch, heads, queries, head_dim), its log2-sum-exp (batch, heads, queries), the record of skipping."""
    global _last_counts  # noqa: PLW0603
    bias = dict(zip(BIAS, (table, total, weight, inverse, knot, base, gain, bend), strict=True))
    prepared = Prepared(q, k, v, bias, documents, padding, zero, causal, symmetric, scale, skip)
    p = prepared.problem
    out, lse = empty_out(q), q.new_empty(q.shape[:3])
    skipping = torch.zeros(skipping_size(q, k, skip and p.form in (TOEPLITZ, RANK_ONE, SUM)), dtype=torch.int64)
    p.out, p.lse, p.skipping = Array.of(out), lse.data_ptr(), skipping.data_ptr() or None
    prepared.run("relpos_forward")
    heads = q.shape[0] * q.shape[1]
    _last_counts = skipping[: heads * COUNTS].view(heads, COUNTS).clone() if len(skipping) else None
    return out, lse, skipping


@forward.register_fake
def _(q, k, v, table, total, weight, inverse, knot, base, gain, bend, documents, padding, zero, causal, symmetric,
      scale, skip):  # type: ignore[no-untyped-def]  # fmt: skip
    some = inverse is None and (table is not None or total is not None)
    skipping = q.new_empty(skipping_size(q, k, skip and some), dtype=torch.int64)
    return empty_out(q), q.new_empty(q.shape[:3]), skipping


@torch.library.custom_op("relpos::attention_backward", mutates_args=())
def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, skipping: Tensor,
    table: Tensor | None, total: Tensor | None, weight: Tensor | None,
    inverse: Tensor | None, knot: Tensor | None, base: Tensor | None, gain: Tensor | None, bend: Tensor | None,
    documents: Tensor | None, padding: Tensor | None, zero: int, causal: bool, symmetric: bool, scale: float,
    learns: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v and, if the bias learns, of its numbers in the order of BIAS (empty for those not given)."""
    bias = dict(zip(BIAS, (table, total, weight, inverse, knot, base, gain, bend), strict=True))
    prepared = Prepared(q, k, v, bias, documents, padding, zero, causal, symmetric, scale, len(skipping) > 0)
    p = prepared.problem
    grads = [torch.empty(x.shape) for x in (q, k, v)]
    p.grad_q, p.grad_k, p.grad_v = (Array.of(x) for x in grads)
    p.grad_out, p.out, p.lse = prepared.array(grad), prepared.array(out), prepared.keep(lse).data_ptr()
    p.skipping = prepared.keep(skipping).data_ptr() or None
    if not learns:
        prepared.run("relpos_backward")
        return grads
    slots = library.load().relpos_slots(ctypes.byref(p))
    heads, rows = q.shape[1], tuple(q.shape[:3])
    room: dict[str, Tensor] = {}
    if table is not None:
        room["grad_table"] = torch.zeros(slots, heads, table.shape[-1] + 2 * TABLE_PAD)
    if total is not None:
        room["grad_total"] = torch.zeros(total.shape, dtype=torch.float64)
        if symmetric:
            room["grad_total_query"] = torch.empty(rows)
        if weight is not None:
            room["grad_weight"] = torch.empty(rows)
    if knot is not None:
        room["grad_inverse"] = torch.empty(rows)
        room["grad_scaled_sums"] = torch.zeros(slots, heads, 4, len(knot) + 1, dtype=torch.float64)
    for name, x in room.items():
        setattr(p, name, x.data_ptr())
    prepared.run("relpos_backward")
    found = bias_gradients(room, bias, k.shape[2])
    return grads + [found.get(name, torch.empty(0)) for name in BIAS]


def bias_gradients(room: dict[str, Tensor], bias: dict[str, Tensor | None], keys: int) -> dict[str, Tensor]:
    """The gradients of the bias's numbers from the kernel's sums."""
    found: dict[str, Tensor] = {}

    def at_queries(x: Tensor) -> Tensor:
        return F.pad(x, (keys - x.shape[-1], 0))  # the queries are the last positions

    if "grad_table" in room:
        by_head = room["grad_table"].sum(0)[:, TABLE_PAD:-TABLE_PAD]  # (heads, distances)
        table = bias["table"]
        assert table is not None
        found["table"] = by_head.contiguous() if table.dim() == 2 else by_head.sum(0)
    if "grad_total" in room:
        found["total"] = room["grad_total"]
        if "grad_total_query" in room:
            found["total"] += at_queries(room["grad_total_query"])
        if "grad_weight" in room:
            found["weight"] = at_queries(room["grad_weight"])
    if "grad_scaled_sums" in room:
        inverse, knot, bend = bias["inverse"], bias["knot"], bias["bend"]
        assert inverse is not None and knot is not None and bend is not None
        by_batch = at_queries(room["grad_inverse"].double().sum(1))  # (batch, keys)
        found["inverse"] = by_batch if inverse.shape[0] > 1 else by_batch.sum(0, keepdim=True)
        plain, times_x, above, passed = room["grad_scaled_sums"].sum(0).unbind(1)  # (heads, knots + 1) each
        # A constant moves no weight: what is summed for it is rounding.
        found["base"], found["gain"] = torch.zeros(len(plain), dtype=torch.float64), times_x.sum(1)
        # What a knot received where a whole strip had passed it.
        later_plain, later_x = (x.flip(1).cumsum(1).flip(1)[:, 1:] for x in (plain, times_x))
        found["bend"] = above[:, :-1] + later_x - knot * later_plain
        found["knot"] = -(bend * (passed[:, :-1] + later_plain)).sum(0)
    return found


@backward.register_fake
def _(grad, q, k, v, out, lse, skipping, table, total, weight, inverse, knot, base, gain, bend, documents, padding,
      zero, causal, symmetric, scale, learns):  # type: ignore[no-untyped-def]  # fmt: skip
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    if not learns:
        return grads
    bias = (table, total, weight, inverse, knot, base, gain, bend)
    return grads + [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in bias]


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


forward.register_autograd(_differentiate, setup_context=_setup)
