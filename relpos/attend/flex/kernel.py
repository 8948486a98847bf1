"""The compiled call of FlexAttention, and the blocks of 128 keys that a block of 128 queries sees.

Without padding, a query sees one interval of keys, from `lowest` to `highest`. Both rise with the query, and the
intervals of neighbours touch. So a block of queries sees the interval from the lowest key of its first query to the
highest key of its last, and the blocks follow from a few integers per block: nothing of size queries × keys is made,
and no value is read by the host.
"""

import inspect
import weakref
from collections import deque
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
from relpos.forms.call import Call, document_ends
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


def intervals(call: Call) -> tuple[Tensor, Tensor]:
    """The first and the last key that each query sees: (1 or batch, queries), int32.

    Beyond the keys the first may be larger than the last: such a query sees nothing.
    """
    i = call.i.to(torch.int32)[None]  # (1, queries)
    lowest, highest = torch.zeros_like(i), torch.full_like(i, call.keys - 1)
    if call.causal:
        highest = torch.minimum(highest, i)
    if call.window is not None:
        left, right = call.window
        lowest, highest = torch.maximum(lowest, i - left), torch.minimum(highest, i + right)
    if call.documents is not None:
        rows = slice(call.first, call.first + call.queries)
        first, end = (ends[:, rows].to(torch.int32) for ends in document_ends(call.documents))  # (batch, queries)
        lowest, highest = torch.maximum(lowest, first), torch.minimum(highest, end - 1)
    return lowest, highest


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


class Recent:
    """The sights of the last few geometries. It keeps no tensor alive but its results.

    Tensors are the same if they are the same object, unchanged: `_version` counts changes in place.
    """

    def __init__(self, size: int) -> None:
        self._entries: deque[tuple[Any, tuple[Any, ...], Sight]] = deque(maxlen=size)

    def find(self, geometry: Any, tensors: tuple[Tensor | None, ...], build: Callable[[], Sight]) -> Sight:
        """The sight for these arguments; `build` computes it if it is not among the last few."""
        if any(x is not None and x.is_inference() for x in tensors):
            return build()  # a tensor of inference mode does not count its changes
        for same_geometry, marks, result in tuple(self._entries):
            if same_geometry == geometry and all(_is_marked(x, mark) for x, mark in zip(tensors, marks, strict=True)):
                return result
        with torch.inference_mode(False), torch.no_grad():  # a later call may train with the result
            result = build()
        marks = tuple(None if x is None else (weakref.ref(x), x._version) for x in tensors)
        self._entries.append((geometry, marks, result))
        return result

    def __len__(self) -> int:
        return len(self._entries)


def _is_marked(x: Tensor | None, mark: tuple[Any, int] | None) -> bool:
    if x is None or mark is None:
        return x is None and mark is None
    return mark[0]() is x and mark[1] == x._version


RECENT = Recent(8)  # a model has few geometries: full and windowed, training and evaluation
