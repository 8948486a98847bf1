"""The definition applied to one block of queries at a time, in plain torch: memory of block × length.

It runs every form on every device: the encodings that read the scores, and all others where no faster backend can run.
What a block materialises is discarded and computed again in the backward.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from relpos.attend import reference
from relpos.forms.bias import Form, Projected, Scaled, terms
from relpos.forms.call import Call
from relpos.forms.tracing import is_transformed
from relpos.system.memory import give_back_freed_memory

FASTEST_ON: tuple[str, ...] = ()
LOGITS = 2**20  # values that a block may materialise: 4 MB in float32, so that a block fits into the caches
BLOCKS_BETWEEN_TRIMS = 4


def refuses(q: Tensor, v: Tensor, form: Form | None, call: Call) -> str | None:
    """It runs every call."""
    return None


def block_size(q: Tensor, form: Form | None, call: Call) -> int:
    """Number of queries per block."""
    row, least = call.keys * q.shape[0] * q.shape[1], 16
    for term in terms(form):
        if isinstance(term, Scaled):  # its units are materialised
            row = max(row, call.keys * term.row.shape[0] * len(term.slope))
        if isinstance(term, Projected) and term.of_keys:  # each block has the products of all keys
            least = max(least, term.table.shape[1] // 4)
        elif isinstance(term, Projected):
            row = max(row, term.table.shape[1] * q.shape[0] * q.shape[1])
    return min(call.queries, max(least, LOGITS // row))


def attention(q: Tensor, k: Tensor, v: Tensor, form: Form | None, call: Call) -> tuple[Tensor, Tensor | None]:
    """Attention by blocks of queries: (batch, heads, queries, value_dim), and the log-sum-exp."""
    k, v = reference.hide_padding(k, call), reference.hide_padding(v, call)
    careful = reference.needs_care(q, k, v)
    q, k = call.rotated(q, k)
    size = block_size(q, form, call)
    # Recompute blocks in the backward, which torch.func does not support.
    recompute = torch.is_grad_enabled() and call.queries > size and not is_transformed()
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    i = call.i
    for number, start in enumerate(range(0, call.queries, size)):
        trim = number % BLOCKS_BETWEEN_TRIMS == BLOCKS_BETWEEN_TRIMS - 1

        # The form's tensors reach the block through the closure; gradients flow back to them all the same.
        def block(q: Tensor, k: Tensor, v: Tensor, i: Tensor, trim: bool = trim) -> tuple[Tensor, Tensor | None]:
            if trim:
                give_back_freed_memory()
            return reference.rows(q, k, v, form, call, i, careful)

        inputs = (q[:, :, start : start + size], k, v, i[start : start + size])
        out, lse = (
            checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False) if recompute else block(*inputs)
        )
        outs.append(out)
        if lse is not None:
            lses.append(lse)
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    return out, torch.cat(lses, dim=2) if lses else None
