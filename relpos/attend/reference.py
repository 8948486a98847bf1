"""The definition of attention with a positional encoding. Every faster way is held to this one.

logits_ij = scale · q_i·k_j + B_ij        (q, k rotated where the encoding rotates)
out_i     = Σ_j softmax_j(logits_i) · v_j (over the keys that i may see; 0 if there are none)
"""

import torch
from torch import Tensor

from relpos.attend.inputs import check_finite
from relpos.encodings.call import Call, products
from relpos.encodings.encoding import Encoding


def logits(q: Tensor, k: Tensor, position: Encoding | None, call: Call) -> tuple[Tensor, Tensor]:
    """The logits (batch, heads, queries, keys), and which of them count (1 or batch, 1, queries, keys)."""
    q, k = q.to(call.dtype), k.to(call.dtype)
    form = None
    if position is not None:
        q, k = position.rotate(q, k, call)
        form = position.bias(call)
    visible = call.visible(call.i)
    scores = products(q * call.scale, k)
    if form is None:
        return scores, visible
    for name, numbers in form.tensors():
        check_finite(name, numbers)
    return scores + form.block(call.i, call.j, scores, visible), visible


def attention(q: Tensor, k: Tensor, v: Tensor, position: Encoding | None, call: Call) -> Tensor:
    """Attention by writing out all logits: (batch, heads, queries, head_dim)."""
    scores, visible = logits(q, k, position, call)
    alone = ~visible.any(dim=-1, keepdim=True)
    # A row that sees nothing gets weights of 0, and no NaN on the way back.
    scores = scores.masked_fill(~visible, -torch.inf).masked_fill(alone, 0.0)
    weights = scores.softmax(dim=-1).masked_fill(~visible, 0.0)
    batch, heads, queries, keys = weights.shape
    grouped = weights.reshape(batch, v.shape[1], -1, queries, keys)  # (batch, key_heads, group, queries, keys)
    out = grouped @ v.to(call.dtype)[:, :, None]
    return out.reshape(batch, heads, queries, v.shape[3]).to(q.dtype)
