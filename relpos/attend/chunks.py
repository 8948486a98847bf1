"""The definition a block of queries at a time, in plain torch: memory of block × length, forward and backward.

For every form, on every device; the way of the score-dependent encodings, and of all when nothing faster is there.
What a block writes out is thrown away and computed again in the backward.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from relpos.attend import reference
from relpos.encodings.call import Call
from relpos.encodings.forms import Form, Scaled, terms
from relpos.encodings.tracing import is_transformed

LOGITS = 2**20  # numbers a block may write out; 4 MB in float32, so that a block stays near the caches
BLOCKS_BETWEEN_TRIMS = 4


def refuses(q: Tensor, form: Form | None, call: Call) -> str | None:
    """It runs everything."""
    return None


def block_size(q: Tensor, form: Form | None, call: Call) -> int:
    """Queries a block."""
    row = call.keys * q.shape[0] * q.shape[1]
    for term in terms(form):
        if isinstance(term, Scaled):  # its units are written out
            row = max(row, call.keys * term.row.shape[0] * len(term.slope))
    return min(call.queries, max(16, LOGITS // row))


def attention(q: Tensor, k: Tensor, v: Tensor, form: Form | None, call: Call) -> Tensor:
    """Attention by blocks of queries: (batch, heads, queries, head_dim)."""
    size = block_size(q, form, call)
    # Computed again in the backward; torch.func cannot do that.
    again = torch.is_grad_enabled() and call.queries > size and not is_transformed()
    out, i = [], call.i
    for number, start in enumerate(range(0, call.queries, size)):
        trim = number % BLOCKS_BETWEEN_TRIMS == BLOCKS_BETWEEN_TRIMS - 1

        # The form's own numbers reach the block through the closure; their gradients find their way back all the same.
        def block(q: Tensor, k: Tensor, v: Tensor, i: Tensor, trim: bool = trim) -> Tensor:
            if trim:
                give_back_freed_memory()
            return reference.rows(q, k, v, form, call, i)

        inputs = (q[:, :, start : start + size], k, v, i[start : start + size])
        out.append(
            checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False) if again else block(*inputs)
        )
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


def give_back_freed_memory() -> None:
    """Hand freed memory back to the system, where the C library would sit on it.

    Before version 2.38, glibc hardly reuses freed pieces that were aligned, as torch's are: without this, a long row of
    blocks grows the process by several gigabytes though next to nothing is in use.
    """
    if torch.compiler.is_compiling():
        return
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc
        return None
    return found
