"""The one operation: attention with any encoding."""

import torch
from torch import Tensor

from relpos.attend import reference
from relpos.attend.inputs import check_tensors, make_call
from relpos.encodings.encoding import Encoding


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

    Gives (batch, heads, queries, head_dim) in the dtype of q, computed in float32 at least. A query that may see no key
    gets 0.
    """
    check_tensors(q, k, v)
    with torch.autocast(q.device.type, enabled=False):
        call = make_call(q, k, position, hidden, gates, causal, documents, padding, scale)
        return reference.attention(q, k, v, position, call)


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
    with torch.autocast(q.device.type, enabled=False):
        call = make_call(q, k, position, hidden, gates, causal, documents, padding, scale)
        written, visible = reference.logits(q, k, position, call)
        return written.masked_fill(~visible, -torch.inf)
