"""Attention with any encoding, as one operation."""

import torch
from torch import Tensor

from relpos.attend import reference
from relpos.attend.backends import choose
from relpos.encodings.call import Call
from relpos.encodings.encoding import Encoding
from relpos.encodings.forms import Form
from relpos.encodings.inputs import check_finite, check_tensors, make_call
from relpos.encodings.tracing import without_autocast


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Encoding | None = None,
    *,
    hidden: Tensor | None = None,
    gates: Tensor | None = None,
    causal: bool = True,
    documents: Tensor | None = None,
    padding: Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute attention with a positional encoding.

    Args:
        q: Queries, (batch, heads, queries, head_dim). With fewer queries than keys, they stand at the last positions
            (decoding with a cache).
        k: Keys, (batch, key_heads, keys, head_dim), not rotated. Each key head serves heads / key_heads heads.
        v: Values, in the shape of k.
        position: An encoding from `relpos.encoding`. It rotates q and k and adds its bias here. An encoding of the
            embedding does nothing here: call `position.embed` on the token embeddings before.
        hidden: The layer's normalised input, (batch, keys, width), for encodings that read it.
        gates: `position.gates(hidden)`, (batch, heads, keys, gate_size), in place of hidden: what a cache keeps while
            decoding.
        causal: Whether a query sees only keys up to its own position.
        documents: Ids of packed documents, integers (batch, keys). There is no attention across documents, and
            positions restart at 0 in each.
        padding: Boolean (batch, keys), False for keys that must not be seen. It changes no position.
        scale: Factor of q·k; head_dim^−½ if None. The bias is not scaled.
        backend: "native", "flex", "chunks" or "reference"; if None, the fastest that can run this call.

    Returns:
        (batch, heads, queries, head_dim) in the dtype of q, computed in float32 at least. A query that may see no key
        gets 0.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: Shapes do not match, the encoding needs another argument, or the backend cannot run this call.

    Example:
        >>> position = relpos.encoding("cable", heads=12, head_dim=64)
        >>> out = relpos.attention(q, k, v, position, hidden=x)
    """
    check_tensors(q, k, v)
    with without_autocast(q.device):
        call = make_call(q, k, position, hidden, gates, causal, documents, padding, scale)
        q, k, form = positioned(q, k, position, call)
        return choose(backend, q, form, call).attention(q, k, v.to(q.dtype), form, call).to(v.dtype)


def scores(
    q: Tensor,
    k: Tensor,
    position: Encoding | None = None,
    *,
    hidden: Tensor | None = None,
    gates: Tensor | None = None,
    causal: bool = True,
    documents: Tensor | None = None,
    padding: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute the attention scores before the softmax, to look at them. This materialises queries × keys values.

    Args:
        q: Queries, (batch, heads, queries, head_dim).
        k: Keys, (batch, key_heads, keys, head_dim), not rotated.
        position: An encoding from `relpos.encoding`.
        hidden: The layer's normalised input, (batch, keys, width), for encodings that read it.
        gates: `position.gates(hidden)`, (batch, heads, keys, gate_size), in place of hidden.
        causal: Whether a query sees only keys up to its own position.
        documents: Ids of packed documents, integers (batch, keys).
        padding: Boolean (batch, keys), False for keys that must not be seen.
        scale: Factor of q·k; head_dim^−½ if None. The bias is not scaled.

    Returns:
        (batch, heads, queries, keys), −inf where a key is not seen.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: Shapes do not match, or the encoding needs another argument.

    Example:
        >>> weights = relpos.scores(q, k, relpos.encoding("alibi", heads=12, head_dim=64)).softmax(-1)
    """
    check_tensors(q, k, None)
    with without_autocast(q.device):
        call = make_call(q, k, position, hidden, gates, causal, documents, padding, scale)
        q, k, form = positioned(q, k, position, call)
        logits, visible = reference.logits(q, k, form, call, call.i)
        return logits.masked_fill(~visible, -torch.inf)


def positioned(q: Tensor, k: Tensor, position: Encoding | None, call: Call) -> tuple[Tensor, Tensor, Form | None]:
    """Return queries and keys, rotated if the encoding rotates, and the form of its bias."""
    if position is None:
        return q, k, None
    if "query and key" in position.places:  # in float32 at least: half precision would lose the angles to rounding
        q, k = position.rotate(q.to(call.dtype), k.to(call.dtype), call)
    form = position.bias(call)
    if form is not None:
        for name, numbers in form.tensors():
            check_finite(name, numbers)
    return q, k, form
