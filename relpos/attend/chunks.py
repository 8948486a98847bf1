"""The definition a block of queries at a time, in plain torch: memory of block × length, forward and backward.

For every form, on every device; the way of the score-dependent encodings, and of all when nothing faster is there.
What a block writes out is thrown away and computed again in the backward.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from relpos.attend import reference
from relpos.encodings.call import Call
from relpos.encodings.forms import Form, Scaled

LOGITS = 2**22  # numbers a block may write out; 16 MB in float32, so that a block stays near the caches


def refuses(q: Tensor, form: Form | None, call: Call) -> str | None:
    """It runs everything."""
    return None


def block_size(q: Tensor, form: Form | None, call: Call) -> int:
    """Queries a block."""
    row = call.keys * q.shape[0] * q.shape[1]
    if isinstance(form, Scaled):
        row = call.keys * max(q.shape[0] * q.shape[1], form.row.shape[0] * len(form.slope))  # its units are written out
    return min(call.queries, max(16, LOGITS // row))


def attention(q: Tensor, k: Tensor, v: Tensor, form: Form | None, call: Call) -> Tensor:
    """Attention by blocks of queries: (batch, heads, queries, head_dim)."""
    size = block_size(q, form, call)

    def block(q: Tensor, k: Tensor, v: Tensor, i: Tensor) -> Tensor:
        return reference.rows(q, k, v, form, call, i)

    out = []
    for start in range(0, call.queries, size):
        inputs = (q[:, :, start : start + size], k, v, call.i[start : start + size])
        # The form's own numbers reach the block through the closure; their gradients find their way back all the same.
        kept = torch.is_grad_enabled() and call.queries > size
        out.append(
            checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False) if kept else block(*inputs)
        )
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)
