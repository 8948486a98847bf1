"""The inputs of a compiled kernel, native or Triton: one list, made of a call and a form by differentiable torch."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.attend.piecewise import hinges
from relpos.forms.bias import Form, Projected, RankOne, Scaled, Toeplitz, terms
from relpos.forms.call import Call
from relpos.forms.tracing import is_transformed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of q, k and v
NOWHERE = 2**31 - 1  # a distance that does not occur


@dataclass(slots=True)
class Inputs:
    """The arguments of a kernel's operator, in its order."""

    q: Tensor  # (batch, heads, queries, head_dim)
    k: Tensor  # (batch, key_heads, keys, head_dim)
    v: Tensor  # (batch, key_heads, keys, value_dim)
    # The bias: each form sets its own.
    table: Tensor | None = None  # Toeplitz: (heads, distances)
    total: Tensor | None = None  # RankOne: (batch, heads, tokens), float64; or
    step: Tensor | None = None  # the steps of which it is the running sum
    weight: Tensor | None = None  # (batch, heads, tokens)
    curve: Tensor | None = None  # Scaled: (distances,)
    inverse: Tensor | None = None  # 1 / row, (1 or batch, queries)
    knot: Tensor | None = None  # (knots,)
    base: Tensor | None = None  # (heads,)
    gain: Tensor | None = None  # (heads,)
    bend: Tensor | None = None  # (heads, knots)
    query_vectors: Tensor | None = None  # Projected: (1 or batch, heads, queries, size)
    query_relative: Tensor | None = None  # (1 or heads, distances, size)
    key_vectors: Tensor | None = None  # Projected, of keys: (1 or batch, heads, keys, size)
    key_relative: Tensor | None = None
    sinks: Tensor | None = None  # (heads,)
    # What has no gradient.
    q_cos: Tensor | None = None  # (1 or batch, queries, pairs)
    q_sin: Tensor | None = None
    k_cos: Tensor | None = None  # (1 or batch, keys, pairs)
    k_sin: Tensor | None = None
    documents: Tensor | None = None  # (batch, keys)
    padding: Tensor | None = None  # (batch, keys)
    seed: Tensor | None = None  # of the dropout, 0-d
    start: int = 0  # index of the first query
    zero: int = 0  # column of distance 0
    window_left: int = -1  # −1: no limit
    window_right: int = -1
    far_low: int = -NOWHERE  # the table is constant up to this distance,
    far_high: int = NOWHERE  # and from this one on
    causal: bool = True
    symmetric: bool = False
    interleaved: bool = False
    skip: bool = True
    return_lse: bool = False
    scale: float = 1.0
    softcap: float = 0.0  # 0: none
    dropout: float = 0.0

    def values(self) -> tuple[Any, ...]:
        """All arguments, in order."""
        return tuple(getattr(self, name) for name in NAMES)


NAMES = tuple(item.name for item in fields(Inputs))
TENSORS = tuple(item.name for item in fields(Inputs) if "Tensor" in str(item.type))
LEARNED = TENSORS[: TENSORS.index("sinks") + 1]  # those with a gradient
BIAS = LEARNED[3:-1]


def columns(call: Call) -> tuple[int, int]:
    """Column of distance 0 of a table over the differences of indices, and number of its columns."""
    zero = 0 if call.causal else max(0, call.keys - 1 - call.first)
    return zero, zero + call.first + call.queries


def refuses_tensors(kernel: str, q: Tensor, v: Tensor, widest: int) -> str | None:
    """Why a kernel, named as in "the native kernel", cannot run such tensors, as a sentence; None if it can."""
    if q.dtype not in DTYPES:
        return f"{kernel} computes in float32, but q is {q.dtype}."
    if max(q.shape[-1], v.shape[-1]) > widest:
        return f"{kernel} runs head_dim and value_dim up to {widest}, not {q.shape[-1]} and {v.shape[-1]}."
    if is_transformed():
        return (
            f"{kernel} has reverse-mode gradients only, and this call is inside a transform of torch.func or "
            "forward-mode differentiation: leave backend= out, and the reference runs (in memory length²)."
        )
    return None


def make_inputs(q: Tensor, k: Tensor, v: Tensor, form: Form | None, call: Call, skip: bool) -> Inputs:
    """The inputs for a call that a kernel can run; the rotation is still to be set, or applied."""
    inputs = Inputs(
        q,
        k.to(q.dtype),
        v.to(q.dtype),
        sinks=call.sinks,
        documents=call.documents,
        padding=call.padding,
        start=call.first,
        zero=columns(call)[0],
        causal=call.causal,
        skip=skip,
        return_lse=call.return_lse,
        scale=call.scale,
        softcap=call.softcap or 0.0,
        dropout=call.dropout,
        seed=call.seed,
    )
    if call.window is not None:
        inputs.window_left, inputs.window_right = call.window
    describe(form, call, inputs)
    return inputs


def describe(form: Form | None, call: Call, inputs: Inputs) -> None:
    """Set the inputs of a bias."""
    for term in terms(form):
        DESCRIPTIONS[type(term)](term, call, inputs)


def describe_table(form: Toeplitz, call: Call, inputs: Inputs) -> None:
    """The table over the distances of the call, (heads, distances); several tables are added."""
    zero, distances = columns(call)
    table = form.table.float()
    if table.shape[1] != distances or form.zero != zero:
        column = torch.arange(distances, device=table.device) - zero + form.zero
        table = table[:, column.clamp(0, table.shape[1] - 1)]
    low, high = form.ends or (-NOWHERE, NOWHERE)
    if inputs.table is not None:
        low, high, table = min(low, inputs.far_low), max(high, inputs.far_high), inputs.table + table
    inputs.table, inputs.far_low, inputs.far_high = table, low, high


def describe_totals(form: RankOne, call: Call, inputs: Inputs) -> None:
    """Step or total, and weight, (batch, heads, tokens): of the keys, and of queries that come after them."""
    shape = (inputs.q.shape[0], inputs.q.shape[1], form.total.shape[-1])
    if form.step is None:
        inputs.total = form.total.double().expand(shape)
    else:
        inputs.step = form.step.float().expand(shape)
    inputs.weight = None if form.weight is None else form.weight.float().expand(shape)
    inputs.symmetric = form.symmetric
    inputs.skip = inputs.skip and call.among_keys  # what may be skipped is bounded by the totals of the keys


def describe_curve(form: Scaled, call: Call, inputs: Inputs) -> None:
    """The table, (distances,), the factor of each query, (1 or batch, queries), and the hinges."""
    inputs.inverse = 1.0 / form.row.double()
    inputs.knot, inputs.base, inputs.gain, inputs.bend = hinges(form, inputs.inverse)
    inputs.curve = form.table.float()
    zero, distances = columns(call)
    if len(form.table) != distances or zero:  # the distance of a key after the query counts as 0
        column = (torch.arange(distances, device=inputs.curve.device) - zero).clamp(0, len(form.table) - 1)
        inputs.curve = inputs.curve[column]


def describe_vectors(form: Projected, call: Call, inputs: Inputs) -> None:
    """Vectors of the tokens, and of each distance, (1 or heads, distances, size)."""
    zero, distances = columns(call)
    number = form.table.shape[1] if form.row is None else len(form.row)
    column = (torch.arange(distances, device=form.table.device) - zero + form.zero).clamp(0, number - 1)
    if form.row is None:
        relative = form.table[:, column]
    else:  # a product, since the gradient of an index adds by atomics on a GPU
        one_hot = F.one_hot(form.row[column].long(), form.table.shape[1]).to(form.table.dtype)
        relative = one_hot @ form.table
    if form.of_keys:
        inputs.key_vectors, inputs.key_relative = form.vectors, relative
    else:
        inputs.query_vectors, inputs.query_relative = form.vectors, relative


DESCRIPTIONS: dict[type[Form], Callable[..., None]] = {
    Toeplitz: describe_table,
    RankOne: describe_totals,
    Scaled: describe_curve,
    Projected: describe_vectors,
}
