"""The definition of attention with a positional bias. The tests compare every other backend with it.

score_ij = scale · q_i·k_j                  (q and k rotated before, where the encoding rotates)
score_ij ← softcap · tanh(score_ij / softcap)                     (where there is a softcap)
logit_ij = score_ij + B_ij
w_ij     = e^logit_ij / (Σ_j e^logit_ij + e^sink)   (over the keys that i may see; the sink only where there is one)
out_i    = Σ_j w_ij · d_ij · v_j            (d: 0 or 1 / (1 − dropout); 0 for a query that sees no key)
lse_i    = log(Σ_j e^logit_ij + e^sink)

A key whose logit is −inf is not seen.
"""

import torch
from torch import Tensor

from relpos.attend.dropout import factors
from relpos.encodings.call import Call, products
from relpos.encodings.forms import Form

FASTEST_ON: tuple[str, ...] = ()


def refuses(q: Tensor, form: Form | None, call: Call) -> str | None:
    """It runs every call."""
    return None


def logits(q: Tensor, k: Tensor, form: Form | None, call: Call, i: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the queries at the indices `i`, (batch, heads, rows, keys), and which keys count, (…, rows, keys).

    q and k are rotated already.
    """
    visible = call.visible(i)
    scores = products(q.to(call.dtype) * call.scale, k.to(call.dtype))
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    return scores if form is None else scores + form.block(i, call.j, scores, visible), visible


def weights(q: Tensor, k: Tensor, form: Form | None, call: Call, i: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the queries at the indices `i`, before any dropout; q and k are rotated already.

    Returns:
        (batch, heads, rows, keys), 0 for keys that are not seen; and the log-sum-exp (batch, heads, rows).
    """
    scores, visible = logits(q, k, form, call, i)
    scores = scores.masked_fill(~visible, -torch.inf)
    keys = scores.shape[-1]
    if call.sinks is not None:
        sink = call.sinks.to(call.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    # A row that sees no key gets weights of 0, and its gradients have no NaN.
    alone = (scores == -torch.inf).all(dim=-1, keepdim=True)
    scores = scores.masked_fill(alone, 0.0)
    lse = scores.logsumexp(dim=-1).masked_fill(alone[..., 0], -torch.inf)
    return scores.softmax(dim=-1).masked_fill(alone, 0.0)[..., :keys], lse


def rows(q: Tensor, k: Tensor, v: Tensor, form: Form | None, call: Call, i: Tensor) -> tuple[Tensor, Tensor | None]:
    """Attention of the queries at the indices `i`, whose q and k are rotated already.

    Returns:
        (batch, heads, rows, value_dim), and the log-sum-exp (batch, heads, rows) if the call asks for it.
    """
    shares, lse = weights(q, k, form, call, i)
    if call.dropout:
        assert call.seed is not None
        shares = shares * factors(call.seed, call.dropout, call.batch, call.heads, i, call.j, call.dtype)
    grouped = shares.reshape(shares.shape[0], v.shape[1], -1, *shares.shape[2:])  # (…, key_heads, group, rows, keys)
    out = grouped @ v.to(call.dtype)[:, :, None]
    return out.reshape(*q.shape[:3], v.shape[3]).to(v.dtype), lse if call.return_lse else None


def attention(q: Tensor, k: Tensor, v: Tensor, form: Form | None, call: Call) -> tuple[Tensor, Tensor | None]:
    """Attention with all logits materialised: (batch, heads, queries, value_dim), and the log-sum-exp."""
    q, k = call.rotated(q, k)
    return rows(q, k, v, form, call, call.i)
