"""The score and mask functions of FlexAttention: what happens to one score, and whether it counts.

Every number is a captured tensor. A tensor with a gradient is indexed exactly once: FlexAttention adds up the gradient
of each index into a tensor of its own, and its backward refuses a tensor that is indexed twice, or not at all.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.attend.piecewise import pieces
from relpos.forms.bias import Form, Positions, RankOne, Scaled, Toeplitz, terms
from relpos.forms.call import Call

Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # (score, b, h, query, key) -> score
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (b, h, query, key) -> seen
Distance = Callable[[Tensor, Tensor, Tensor], Tensor]  # (b, query, key) -> distance
COPIES = 64  # of the few values of a Scaled form, so that not every score adds to the same address in the backward


def scalar(number: float, call: Call) -> Tensor:
    """A number as a 0-d tensor on the call's device, int32 or float32."""
    dtype = torch.int32 if isinstance(number, int) else torch.float32
    if torch.compiler.is_compiling():
        return torch.full((), number, dtype=dtype, device=call.device)
    return _kept_scalar(number, dtype, call.device)


@lru_cache(maxsize=64)  # the layers of a model share them
def _kept_scalar(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a later call may train with it
        return torch.full((), number, dtype=dtype, device=device)  # a fill on the device, not a copy from the host


def own(x: Tensor) -> Tensor:
    """x as a contiguous tensor, and no view: FlexAttention's dense implementation gives a captured view no gradient.

    (In PyTorch 2.13, compiled. Its lowering for CUDA decides by the graph instead, but a copy of a table costs little.)
    """
    if x.requires_grad and not torch.compiler.is_compiling() and x._is_view():
        return x.clone(memory_format=torch.contiguous_format)
    return x.contiguous()


def score_function(form: Form | None, call: Call) -> Score:
    """scale, softcap and the terms of the bias, in this order, as a score function of q·k."""
    scale = scalar(float(call.scale), call)
    cap = None if call.softcap is None else scalar(float(call.softcap), call)
    biases = [SCORES[type(term)](term, call) for term in terms(form)]

    def score(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        score = score * scale
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        for bias in biases:
            score = score + bias(b, h, query, key)
        return score

    return score


def masked(score: Score, mask: Mask) -> Score:
    """The score where a key is seen, −inf elsewhere: a mask that needs no blocks."""

    def where_seen(value: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.where(mask(b, h, query, key), score(value, b, h, query, key), -torch.inf)

    return where_seen


def hides(call: Call) -> bool:
    """Whether there is anything that hides a key."""
    return call.causal or any(x is not None for x in (call.window, call.documents, call.padding, call.mask))


def mask_function(call: Call, lowest: Tensor, highest: Tensor) -> Mask:
    """Which keys a query sees: those from `lowest` to `highest`, without padding, where the given mask allows it.

    Both bounds are (1 or batch, queries).
    """
    lowest, highest = lowest.expand(call.batch, -1), highest.expand(call.batch, -1)
    padding, allows = call.padding, None if call.mask is None else given_mask(call)

    def mask(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key >= lowest[b, query]) & (key <= highest[b, query])
        if padding is not None:
            seen = seen & padding[b, key]
        if allows is not None:
            seen = seen & allows(b, h, query, key)
        return seen

    return mask


def given_mask(call: Call) -> Mask:
    """The argument `mask=`, a boolean tensor or a function, as a mask function."""
    if isinstance(call.mask, Tensor):
        allowed = call.mask.expand(call.batch, call.heads, call.queries, call.keys)  # a view: nothing is materialised

        def read(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return allowed[b, h, query, key]

        return read
    assert call.mask is not None
    first = scalar(call.first, call)

    def ask(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return call.ask_mask(b, h, query + first, key)

    return ask


def distance_function(where: Positions | None, call: Call) -> Distance:
    """The distance of a query from a key."""
    if where is None:
        first = scalar(call.first, call)

        def by_index(b: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return query + first - key

        return by_index
    queries, keys = where.queries.expand(call.batch, -1), where.keys.expand(call.batch, -1)

    def by_position(b: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return queries[b, query] - keys[b, key]

    return by_position


def padded(table: Tensor, zero: int, call: Call) -> tuple[Tensor, int]:
    """The table with a column for each distance of a query from a key, seen or not, and the column of distance 0.

    Keys that are not seen are read all the same. An index that is clamped for them is so long that Triton computes the
    weights in the layout of the table, and moves all scores there and back through shared memory.
    """
    lowest, highest = call.first - call.keys + 1, call.first + call.queries - 1
    left, right = max(0, -zero - lowest), max(0, highest + zero - (table.shape[-1] - 1))
    return own(F.pad(table, (left, right)) if left or right else table), zero + left


def toeplitz(form: Toeplitz, call: Call) -> Mask:
    """table[h, i − j]."""
    if form.where is None:
        columns, column = padded(form.table, form.zero, call)
        shift = scalar(call.first + column, call)

        def by_index(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return columns[h, query - key + shift]

        return by_index
    distance, table = distance_function(form.where, call), own(form.table)
    zero, last = scalar(form.zero, call), scalar(table.shape[1] - 1, call)

    def by_position(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # Distances beyond the table belong to keys that are not seen, but they are read all the same.
        return table[h, torch.minimum((distance(b, query, key) + zero).clamp(min=0), last)]

    return by_position


def rank_one(form: RankOne, call: Call) -> Mask:
    """−weight_i · (total_i − total_j), in float32 with the precision of a float64 sum.

    The running sum is split into two float32 values, and the differences of both are added: no float64 on the GPU.
    """
    largest, rows = torch.finfo(torch.float32).max, slice(call.first, call.first + call.queries)
    total = form.total.clamp(-largest, largest)
    # Two tensors of the same values, as each may be indexed only once.
    high_i, high_j = own(total[:, :, rows].float()), own(total.float())  # (batch, heads, queries), (batch, heads, keys)
    low = (total - high_j).detach().float()  # total = high + low has its gradient from high
    weight = None if form.weight is None else own(form.weight[:, :, rows])
    low_i, symmetric = low[:, :, rows].contiguous(), form.symmetric

    def bias(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        gained = (high_i[b, h, query] - high_j[b, h, key]) + (low_i[b, h, query] - low[b, h, key])
        if symmetric:
            gained = gained.abs()
        return -gained if weight is None else -weight[b, h, query] * gained

    return bias


def scaled(form: Scaled, call: Call) -> Mask:
    """The piecewise-linear function of table[i − j] / row[i]: one look-up of the piece instead of all units."""
    edges, centres, bases, gains = pieces(form)
    distance, table, units = distance_function(form.where, call), own(form.table), len(edges)
    last = scalar(len(table) - 1, call)
    row = own(form.row.expand(call.batch, -1))  # (batch, queries)
    column = None if form.column is None else own(form.column.expand(call.batch, -1))  # (batch, keys)
    bases, gains = (own(x.expand(COPIES, *x.shape)) for x in (bases, gains))  # (COPIES, heads, pieces)

    def bias(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        apart = distance(b, query, key)
        scale = row[b, query]
        if column is None:
            apart = apart.clamp(min=0)
        else:
            scale = torch.where(apart < 0, column[b, key], scale)
            apart = apart.abs()
        x = table[torch.minimum(apart, last)] / scale
        piece = torch.zeros_like(key)  # number of edges below x: a bisection nests too deep for the compiler
        for unit in range(units):
            piece = piece + (x > edges[unit]).to(piece.dtype)
        copy = query % COPIES
        return bases[copy, h, piece] + gains[copy, h, piece] * (x - centres[piece])

    return bias


SCORES: dict[type[Form], Callable[..., Mask]] = {Toeplitz: toeplitz, RankOne: rank_one, Scaled: scaled}
