"""The one operation: attention with any encoding."""

import torch
from torch import Tensor

from relpos.attend import reference
from relpos.attend.backends import choose
from relpos.attend.inputs import check_finite, check_tensors, make_call
from relpos.encodings.call import Call
from relpos.encodings.encoding import Encoding
from relpos.encodings.forms import Form
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
    """Attention of queries q (batch, heads, queries, head_dim) to keys k, values v (batch, key_heads, keys, head_dim).

    Fewer queries than keys: the queries are the last positions (decoding with a cache). Fewer key heads than heads:
    each serves heads / key_heads of them.

    position   an encoding from `relpos.encoding`; it rotates q and k and adds its bias here. Keys are given unrotated.
               Encodings of the embedding have acted before (`position.embed`), and do nothing here.
    hidden     (batch, keys, width), the layer's normalised input, for encodings that read it; or
    gates      (batch, heads, keys, …), `position.gates(hidden)`, kept in a cache while decoding
    causal     whether a query sees only keys up to its own position
    documents  (batch, keys), ids of packed documents: no attention across them, positions start anew in each
    padding    (batch, keys), boolean, False for keys that must not be seen; it moves no position
    scale      of q·k; head_dim^−½ unless given. The bias is never scaled.
    backend    which way to run it, by name; the fastest that can unless given

    Gives (batch, heads, queries, head_dim) in the dtype of q, computed in float32 at least. A query that may see no key
    gets 0.
    """
    check_tensors(q, k, v)
    with without_autocast(q.device):
        call = make_call(q, k, position, hidden, gates, causal, documents, padding, scale)
        q, k, form = positioned(q, k, position, call)
        return choose(backend, q, form, call).attention(q, k, v.to(q.dtype), form, call).to(v.dtype)  # type: ignore[no-any-return]


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
    """The attention scores themselves, before the softmax: (batch, heads, queries, keys), −inf where a key is not seen.

    Arguments as for `attention`. This writes out queries × keys numbers; it is for looking at.
    """
    check_tensors(q, k, None)
    with without_autocast(q.device):
        call = make_call(q, k, position, hidden, gates, causal, documents, padding, scale)
        q, k, form = positioned(q, k, position, call)
        written, visible = reference.logits(q, k, form, call, call.i)
        return written.masked_fill(~visible, -torch.inf)


def positioned(q: Tensor, k: Tensor, position: Encoding | None, call: Call) -> tuple[Tensor, Tensor, Form | None]:
    """Queries and keys rotated where the encoding rotates, and the form of its bias."""
    if position is None:
        return q, k, None
    if type(position).rotate is not Encoding.rotate:  # in float32 at least: half precision would round the angles away
        q, k = position.rotate(q.to(call.dtype), k.to(call.dtype), call)
    form = position.bias(call)
    if form is not None:
        for name, numbers in form.tensors():
            check_finite(name, numbers)
    return q, k, form
