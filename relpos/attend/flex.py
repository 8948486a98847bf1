"""CUDA: PyTorch's FlexAttention, compiled, with the form as its score function and documents and causality as its mask.

Gradients reach the form's tensors through the captured tensors. We have not run it on a GPU. The tests compare each
score and mask function with the definition in eager mode on a CPU, values and gradients.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.encodings.call import Call
from relpos.encodings.forms import Form, RankOne, Scaled, Toeplitz, terms

if TYPE_CHECKING:  # FlexAttention is slow to import, and only CUDA needs it
    from torch.nn.attention.flex_attention import BlockMask

FASTEST_ON: tuple[str, ...] = ("cuda",)
Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # (score, b, h, query, key) -> score
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (b, h, query, key) -> seen


def refuses(q: Tensor, form: Form | None, call: Call) -> str | None:
    """Why FlexAttention cannot run this call, or None."""
    if q.device.type != "cuda":
        return f"FlexAttention has a backward on CUDA only, and q is on {q.device.type}."
    if any(type(term) not in SCORES for term in terms(form)):
        return "a Scored bias is a function of complete rows of scores, and FlexAttention passes one score at a time."
    if q.dtype == torch.float64:
        return "FlexAttention computes in float32: for float64 use the reference."
    return None


def toeplitz(form: Toeplitz, first: int) -> Score:
    """table[h, i − j]; the first query has the index `first`."""

    def score(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        column = (query + first - key + form.zero).clamp(0, form.table.shape[1] - 1)
        return score + form.table[h, column]

    return score


def rank_one(form: RankOne, first: int) -> Score:
    """−weight_i · (total_i − total_j), in float32 with the precision of a float64 sum.

    The running sum is split into two float32 values, and the differences of both are added: no float64 on the GPU.
    """
    high = form.total.float()
    low = (form.total - high.double()).float()

    def score(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        i = query + first
        gained = (high[b, h, i] - high[b, h, key]) + (low[b, h, i] - low[b, h, key])
        if form.symmetric:
            gained = gained.abs()
        return score - gained if form.weight is None else score - form.weight[b, h, i] * gained

    return score


def scaled(form: Scaled, first: int) -> Score:
    """The piecewise-linear function of table[i − j] / row[i], unit by unit."""
    rows, units = form.row.shape[0], len(form.slope)

    def score(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        i = query + first
        x = form.table[(i - key).clamp(min=0)] / form.row[b if rows > 1 else torch.zeros_like(b), query]
        bias = form.offset[h]
        for unit in range(units):
            bias = bias + form.out[h, unit] * F.relu(form.slope[unit] * x + form.shift[unit])
        return score + bias

    return score


SCORES: dict[type[Form], Callable[..., Score]] = {Toeplitz: toeplitz, RankOne: rank_one, Scaled: scaled}


def score_function(form: Form | None, call: Call) -> Score | None:
    """The form as a score function of FlexAttention; the terms of a sum are applied in order."""
    functions = [SCORES[type(term)](term, call.keys - call.queries) for term in terms(form)]
    if not functions:
        return None

    def score(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        for function in functions:
            score = function(score, b, h, query, key)
        return score

    return score


def mask_function(call: Call) -> Mask:
    """Which keys a query sees, as a mask function of FlexAttention."""
    first, documents, padding = call.keys - call.queries, call.documents, call.padding

    def mask(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        i = query + first
        seen = i >= key if call.causal else key >= 0
        if documents is not None:
            seen = seen & (documents[b, i] == documents[b, key])
        if padding is not None:
            seen = seen & padding[b, key]
        return seen

    return mask


def block_mask(call: Call, batch: int) -> "BlockMask | None":
    """The blocks to compute. The plain causal mask is cached; the others depend on the batch."""
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415

    if call.documents is not None or call.padding is not None:
        return create_block_mask(mask_function(call), batch, None, call.queries, call.keys, device=call.device)
    return _causal_mask(call.queries, call.keys, call.device) if call.causal else None


@cache
def _causal_mask(queries: int, keys: int, device: torch.device) -> "BlockMask":
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415

    call = Call(queries, keys, device=device)
    return create_block_mask(mask_function(call), None, None, queries, keys, device=device)


@cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415

    return torch.compile(flex_attention, dynamic=False)


def attention(q: Tensor, k: Tensor, v: Tensor, form: Form | None, call: Call) -> tuple[Tensor, Tensor | None]:
    """Attention by compiled FlexAttention: (batch, heads, queries, value_dim), and the log-sum-exp."""
    q, k = call.rotated(q, k)
    out = _compiled()(
        q,
        k,
        v.to(q.dtype),
        score_mod=score_function(form, call),
        block_mask=block_mask(call, len(q)),
        scale=call.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out, None
