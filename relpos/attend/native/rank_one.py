"""The RankOne form in the kernel: running totals as sums of two floats, and weights times log2(e)."""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.attend.native.inputs import Inputs, Keep
from relpos.attend.native.library import constant
from relpos.attend.native.toeplitz import LARGEST_BIAS, LOG2E
from relpos.forms.bias import RankOne
from relpos.forms.call import Call

FORM = "RANK_ONE"
REACH, HEAVIEST, LARGEST_REACH = 30, 60, 120  # exponents of running totals and weights as the kernel receives them


def describe(form: RankOne, call: Call, inputs: Inputs) -> None:
    """Set total and weight, (batch, heads, tokens) each: of the keys, and of queries that come after the keys."""
    shape = (inputs.q.shape[0], inputs.q.shape[1], form.total.shape[-1])
    inputs.total = form.total.double().expand(shape)
    inputs.weight = None if form.weight is None else form.weight.float().expand(shape)
    inputs.symmetric = form.symmetric
    inputs.skip = inputs.skip and call.among_keys  # what may be skipped is bounded by the totals of the keys


def present(inputs: Inputs) -> bool:
    """Whether the inputs have this form."""
    return inputs.total is not None


def fill(problem: ctypes.Structure, inputs: Inputs, keep: Keep) -> None:
    """Set the running total, minus its minimum and split into two floats, and its weight.

    Both are scaled per head by a power of two, so that neither overflows float32, and small differences of the total do
    not become denormal, which the kernel treats as 0.
    """
    p, total = problem, inputs.total
    assert total is not None
    p.symmetric, p.weighted = inputs.symmetric, inputs.weight is not None
    exponent = unit_exponent(total, inputs.weight)
    weight = torch.ones_like(total) if inputs.weight is None else inputs.weight.double()
    scaled = (total - total.amin(dim=-1, keepdim=True)) * power_of_two(-exponent)
    high = scaled.float()
    low = (scaled - high.double()).float()
    factor = (weight * (LOG2E * power_of_two(exponent))).clamp(-LARGEST_BIAS, LARGEST_BIAS).float()
    high, low, factor = (keep(F.pad(x, (0, constant("ROW_PAD")))) for x in (high, low, factor))
    p.total_high, p.total_low, p.weight = high.data_ptr(), low.data_ptr(), factor.data_ptr()
    p.total_stride = high.shape[-1]


def buffers(inputs: Inputs, slots: int) -> dict[str, Tensor]:
    """Memory for the kernel's sums, by field."""
    assert inputs.total is not None
    rows = torch.empty(2, *inputs.q.shape[:3], dtype=torch.float32)
    of_keys = torch.zeros(*inputs.q.shape[:2], inputs.k.shape[2], dtype=torch.float64)
    sums = {"grad_total": of_keys, "grad_total_query": rows[0]}
    return sums if inputs.weight is None else sums | {"grad_weight": rows[1]}


def gradients(sums: dict[str, Tensor], inputs: Inputs, problem: ctypes.Structure) -> dict[str, Tensor]:
    """Gradients of the inputs of this form, from the kernel's sums."""
    assert inputs.total is not None
    tokens, keys, queries = inputs.total.shape[-1], inputs.k.shape[2], inputs.q.shape[2]

    def at_queries(x: Tensor) -> Tensor:
        return F.pad(x, (inputs.start, tokens - queries - inputs.start))  # among all tokens

    unit = power_of_two(unit_exponent(inputs.total, inputs.weight))  # in multiples of which the kernel counts the total
    of_keys = F.pad(sums["grad_total"], (0, tokens - keys))
    own = {"total": (of_keys + at_queries(sums["grad_total_query"])) / unit}
    return own if inputs.weight is None else own | {"weight": (at_queries(sums["grad_weight"]) * unit).float()}


def unit_exponent(total: Tensor, weight: Tensor | None) -> Tensor:
    """Exponent of the unit of a running total, per head: (batch, heads, 1).

    The total then spans about 2^REACH, unless the largest weight would leave the range 2^−HEAVIEST … 2^HEAVIEST; and
    never more than 2^LARGEST_REACH.
    """
    least, largest = total.aminmax(dim=-1, keepdim=True)
    heaviest = torch.ones_like(least) if weight is None else weight.double().abs().amax(dim=-1, keepdim=True)
    spans, weighs = (torch.frexp(x).exponent.long() for x in (largest - least, heaviest))
    return (spans - REACH).clamp(-HEAVIEST - weighs, HEAVIEST - weighs).maximum(spans - LARGEST_REACH)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float64, exactly."""
    return ((exponent + 1023) << 52).view(torch.float64)
