"""The definition of attention with a positional bias. The tests compare every other backend with it.

logits_ij = scale · q_i·k_j + B_ij        (q and k rotated before, where the encoding rotates)
out_i     = Σ_j softmax_j(logits_i) · v_j (over the keys that i may see; 0 if there are none)

A key whose logit is −inf is not seen.
"""

import torch
from torch import Tensor

from relpos.encodings.call import Call, products
from relpos.encodings.forms import Form

FASTEST_ON: tuple[str, ...] = ()


def refuses(q: Tensor, form: Form | None, call: Call) -> str | None:
    """It runs every call."""
    return None


def logits(q: Tensor, k: Tensor, form: Form | None, call: Call, i: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the queries at the indices `i`, (batch, heads, rows, keys), and which keys count, (…, rows, keys)."""
    visible = call.visible(i)
    scores = products(q.to(call.dtype) * call.scale, k.to(call.dtype))
    return scores if form is None else scores + form.block(i, call.j, scores, visible), visible


def rows(q: Tensor, k: Tensor, v: Tensor, form: Form | None, call: Call, i: Tensor) -> Tensor:
    """Attention of the queries at the indices `i`: (batch, heads, rows, head_dim)."""
    scores, visible = logits(q, k, form, call, i)
    scores = scores.masked_fill(~visible, -torch.inf)
    # A row that sees no key gets weights of 0, and its gradients have no NaN.
    alone = (scores == -torch.inf).all(dim=-1, keepdim=True)
    weights = scores.masked_fill(alone, 0.0).softmax(dim=-1).masked_fill(alone, 0.0)
    grouped = weights.reshape(weights.shape[0], v.shape[1], -1, *weights.shape[2:])  # (…, key_heads, group, rows, keys)
    out = grouped @ v.to(call.dtype)[:, :, None]
    return out.reshape(q.shape).to(q.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, form: Form | None, call: Call) -> Tensor:
    """Attention with all logits materialised: (batch, heads, queries, head_dim)."""
    return rows(q, k, v, form, call, call.i)
