"""The compiled call of FlexAttention, and the blocks of 128 keys that a block of 128 queries sees.

Without padding, a query sees one interval of keys, from `lowest` to `highest`. Both rise with the query, and the
intervals of neighbours touch. So a block of queries sees the interval from the lowest key of its first query to the
highest key of its last, and the blocks follow from a few integers per block: nothing of size queries × keys is made,
and no value is read by the host.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex

from relpos.attend.flex.scores import Mask, Score
from relpos.attend.key_intervals import Recent, intervals
from relpos.forms.call import Call
from relpos.forms.rotation import Rotation

NARROWEST = 16  # head_dim or value_dim; tensor cores multiply no smaller matrices
GRAPHS = 64  # per form: one for each combination of arguments and dtype, one more where sizes change
# Older versions of PyTorch have another argument for the log-sum-exp.
WITH_LSE: Mapping[str, Any] = (
    {"return_aux": flex.AuxRequest(lse=True)} if hasattr(flex, "AuxRequest") else {"return_lse": True}
)
BLOCK = 128  # FlexAttention's default; fewer queries do not fill a block, and need none


@lru_cache(maxsize=64)
def compiled(form: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """`attend`, compiled for a bias of this form. A size that changes is compiled once more, as a symbol, then no more.

    PyTorch counts graphs and remembers changing sizes by code. So each form has a copy of the code, with its own name:
    otherwise the sizes of one form's tensors would count as changes of another's.
    """
    code = attend.__code__.replace(co_name=f"attend_{form}")
    copy = FunctionType(code, attend.__globals__, code.co_name)
    limit = {"recompile_limit": GRAPHS} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
    # fullgraph: at the limit, an error rather than FlexAttention's eager mode, which materialises all scores.
    return torch.compile(copy, fullgraph=True, **limit)  # type: ignore[call-overload, no-any-return]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor | None,
    rotation: Rotation | None,
    score: Score,
    block_mask: flex.BlockMask | None,
    sinks: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """What is compiled. The score function scales, because FlexAttention takes its own `scale` for a constant."""
    value_dim = v.shape[-1]
    if padding is not None:  # the kernel multiplies what is hidden by 0, which does not make a NaN 0
        k, v = (x.masked_fill(~padding[:, None, :, None], 0.0) for x in (k, v))
    if rotation is not None:  # in float32, as half precision is too coarse for angles; then back, to be fast
        turned = rotation.apply(q.float(), k.float())
        q, k = turned[0].to(q.dtype), turned[1].to(k.dtype)
    if q.shape[-1] < NARROWEST:
        q, k = (F.pad(x, (0, NARROWEST - x.shape[-1])) for x in (q, k))
    if value_dim < NARROWEST:
        v = F.pad(v, (0, NARROWEST - value_dim))
    options = WITH_LSE if return_lse or sinks is not None else {}
    result = flex.flex_attention(
        q, k, v, score_mod=score, block_mask=block_mask, scale=1.0, enable_gqa=q.shape[1] != k.shape[1], **options
    )
    if not options:
        return result[..., :value_dim], None
    out, extra = result
    lse = extra if isinstance(extra, Tensor) else extra.lse  # (batch, heads, queries), −inf where nothing is seen
    out = out[..., :value_dim]
    if sinks is not None:
        sink = sinks.to(lse.dtype)[:, None]
        out = (out * torch.sigmoid(lse - sink)[..., None]).to(out.dtype)
        lse = torch.logaddexp(lse, sink)
    return out, lse if return_lse else None


Pair = tuple[Tensor, Tensor]  # number and indices: (1 or batch, 1, rows), (1 or batch, 1, rows, columns), int32


class Blocks(NamedTuple):
    """Blocks of keys for each block of queries, and of queries for each block of keys (for the backward).

    Partial blocks need the mask function, full ones do not.
    """

    partial: Pair
    full: Pair
    partial_queries: Pair
    full_queries: Pair


@dataclass(frozen=True)
class Sight:
    """What the queries of a call see, apart from padding and a given mask."""

    lowest: Tensor  # (1 or batch, queries), int32: the first key that a query sees
    highest: Tensor  # (1 or batch, queries), int32: the last one
    blocks: Blocks | None  # None for few queries


def sight(call: Call) -> Sight:
    """What the queries of a call see. The layers of a model that have the same geometry and tensors share it."""
    if torch.compiler.is_compiling():  # identical computations of the layers are merged by the compiler
        return make_sight(call)
    sizes, device = (call.queries, call.keys, call.first, call.batch), str(call.device)
    geometry = (*sizes, call.causal, call.window, call.mask is None, device)
    return RECENT.find(geometry, (call.documents, call.padding), lambda: make_sight(call))


def make_sight(call: Call) -> Sight:
    """What the queries of a call see, computed."""
    lowest, highest = intervals(call)
    return Sight(lowest, highest, None if call.queries < BLOCK else make_blocks(lowest, highest, call))


def make_blocks(lowest: Tensor, highest: Tensor, call: Call) -> Blocks:
    """The blocks that the intervals of the queries touch. A given mask makes all of them partial."""
    first_row = torch.arange(0, call.queries, BLOCK, device=call.device)
    last_row = (first_row + BLOCK - 1).clamp(max=call.queries - 1)
    first_key = torch.arange(0, call.keys, BLOCK, device=call.device)
    last_key = (first_key + BLOCK - 1).clamp(max=call.keys - 1)
    low, high = lowest[:, first_row, None], highest[:, last_row, None]  # (1 or batch, query_blocks, 1)
    touched = (low <= last_key) & (high >= first_key)  # (1 or batch, query_blocks, key_blocks)
    full = (lowest[:, last_row, None] <= first_key) & (highest[:, first_row, None] >= last_key)
    full = full & (last_row - first_row == BLOCK - 1)[:, None] & (last_key - first_key == BLOCK - 1)
    if call.padding is not None:
        before = F.pad(call.padding.cumsum(1), (1, 0))  # (batch, keys + 1): keys that count before each key
        start = torch.maximum(low, first_key).clamp(max=call.keys)
        end = torch.minimum(high, last_key) + 1
        shape = (len(before), *touched.shape[1:])
        start, end = (before.gather(1, x.expand(shape).flatten(1).long()).view(shape) for x in (start, end))
        touched = touched & (end > start)
        full = full & (before[:, last_key + 1] - before[:, first_key] == BLOCK)[:, None]
    if call.mask is not None:
        full = torch.zeros_like(full)
    partial = touched & ~full
    return Blocks(ordered(partial), ordered(full), ordered(partial.mT), ordered(full.mT))


def ordered(blocks: Tensor) -> Pair:
    """How many blocks are True in each row, and their indices first: (…, 1, rows), (…, 1, rows, columns)."""
    marked = blocks[:, None].to(torch.int32)
    indices = marked.argsort(dim=-1, descending=True, stable=True)
    return marked.sum(dim=-1, dtype=torch.int32), indices.to(torch.int32).contiguous()


def block_mask(blocks: Blocks, mask: Mask, call: Call) -> flex.BlockMask:
    """FlexAttention's block mask."""
    return flex.BlockMask(
        (call.queries, call.keys),
        *blocks.partial,
        *blocks.full,
        *blocks.partial_queries,
        *blocks.full_queries,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=mask,
    )


RECENT: Recent[Sight] = Recent(8)  # a model has few geometries: full and windowed, training and evaluation
