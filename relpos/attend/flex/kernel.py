"""The compiled call of FlexAttention, with what comes before (rotation) and after it (sinks)."""

import inspect
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex

from relpos.attend.flex.scores import Score
from relpos.forms.rotation import Rotation

NARROWEST = 16  # head_dim or value_dim; tensor cores multiply no smaller matrices
GRAPHS = 64  # per form: one for each combination of arguments and dtype, one more where sizes change
# Older versions of PyTorch have another argument for the log-sum-exp.
WITH_LSE: dict[str, Any] = (
    {"return_aux": flex.AuxRequest(lse=True)} if hasattr(flex, "AuxRequest") else {"return_lse": True}
)


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
    options: dict[str, Any] = WITH_LSE if return_lse or sinks is not None else {}
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
