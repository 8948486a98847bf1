"""The definition of attention with a positional bias. The tests compare every other backend with it.

score_ij = scale · q_i·k_j                  (q and k rotated before, where the encoding rotates)
score_ij ← softcap · tanh(score_ij / softcap)                     (where there is a softcap)
logit_ij = score_ij + B_ij
w_ij     = e^logit_ij / (Σ_j e^logit_ij + e^sink)   (over the keys that i may see; the sink only where there is one)
out_i    = Σ_j w_ij · d_ij · v_j            (d: 0 or 1 / (1 − dropout); 0 for a query that sees no key)
lse_i    = log(Σ_j e^logit_ij + e^sink)

A key whose logit is −inf is not seen. What a query may not see does not count, whatever it holds, although 0 · NaN is
NaN: keys and values in padding are replaced by 0, and other infinite numbers and NaN, which are rare, take a slower way
(`careful`).
"""

import math

import torch
from torch import Tensor

from relpos.forms.bias import Form
from relpos.forms.call import Call, products
from relpos.forms.tracing import has_values

FASTEST_ON: tuple[str, ...] = ()
LOW = 0xFFFFFFFF  # arithmetic is modulo 2^32, in int64
BITS = 24  # of a hash that decide


def refuses(q: Tensor, v: Tensor, form: Form | None, call: Call) -> str | None:
    """It runs every call."""
    return None


def hide_padding(x: Tensor, call: Call) -> Tensor:
    """Keys or values (batch, key_heads, keys, size), with 0 in place of padding."""
    return x if call.padding is None else x.masked_fill(~call.padding[:, None, :, None], 0.0)


def needs_care(*tensors: Tensor) -> bool:
    """Whether a tensor holds infinite numbers or NaN. Values of a graph or of an accelerator are not read."""
    for x in tensors:
        if x.device.type == "cpu" and has_values(x):
            low, high = torch.aminmax(x.detach())
            if not (math.isfinite(low) and math.isfinite(high)):
                return True
    return False


def products_of_seen(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """q·k where a key is seen, 0 elsewhere. Rows of q and k with infinite numbers or NaN get no gradient."""
    broken_q, broken_k = (~x.isfinite().all(dim=-1, keepdim=True) for x in (q, k))  # (batch, heads, length, 1)
    finite = products(q.masked_fill(broken_q, 0.0), k.masked_fill(broken_k, 0.0))
    broken = broken_q | broken_k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT  # (batch, heads, rows, keys)
    return torch.where(broken, products(q, k).detach(), finite).masked_fill(~visible, 0.0)


def logits(
    q: Tensor, k: Tensor, form: Form | None, call: Call, i: Tensor, careful: bool = False
) -> tuple[Tensor, Tensor]:
    """Logits of the queries at the indices `i`, (batch, heads, rows, keys), and which keys count, (…, rows, keys).

    q and k are rotated already; `careful` as `needs_care` says.
    """
    visible = call.visible(i)
    q, k = q.to(call.dtype) * call.scale, k.to(call.dtype)
    scores = products_of_seen(q, k, visible) if careful else products(q, k)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    return scores if form is None else scores + form.block(i, call.j, scores, visible), visible


def weights(
    q: Tensor, k: Tensor, form: Form | None, call: Call, i: Tensor, careful: bool = False
) -> tuple[Tensor, Tensor]:
    """Weights of the queries at the indices `i`, before any dropout; q and k are rotated already.

    Returns:
        (batch, heads, rows, keys), 0 for keys that are not seen; and the log-sum-exp (batch, heads, rows).
    """
    scores, visible = logits(q, k, form, call, i, careful)
    scores = scores.masked_fill(~visible, -torch.inf)
    keys = scores.shape[-1]
    if call.sinks is not None:
        sink = call.sinks.to(call.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    # A row that sees no key gets weights of 0, and its gradients have no NaN.
    alone = (scores == -torch.inf).all(dim=-1, keepdim=True)
    scores = scores.masked_fill(alone, 0.0)
    lse = scores.logsumexp(dim=-1).masked_fill(alone[..., 0], -torch.inf)
    shares = scores.softmax(dim=-1).masked_fill(alone, 0.0)[..., :keys]
    return shares.masked_fill(~visible, 0.0) if careful else shares, lse


def sum_of_seen(shares: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Values summed by their weights (batch, key_heads, group, rows, keys), without those that a query does not see.

    Infinite numbers and NaN among the values get no gradient.
    """
    broken = ~v.isfinite()
    finite = shares @ v.masked_fill(broken, 0.0)
    seen = visible.expand(len(v), shares.shape[1] * shares.shape[2], -1, -1).reshape_as(shares).to(v.dtype)
    return torch.where(seen @ broken.to(v.dtype) > 0, (shares @ v).detach(), finite)


def rows(
    q: Tensor, k: Tensor, v: Tensor, form: Form | None, call: Call, i: Tensor, careful: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Attention of the queries at the indices `i`, whose q and k are rotated already.

    Returns:
        (batch, heads, rows, value_dim), and the log-sum-exp (batch, heads, rows) if the call asks for it.
    """
    shares, lse = weights(q, k, form, call, i, careful)
    if call.dropout:
        shares = shares * dropout_factors(call, i)
    grouped = shares.reshape(shares.shape[0], v.shape[1], -1, *shares.shape[2:])  # (…, key_heads, group, rows, keys)
    values = v.to(call.dtype)[:, :, None]
    out = sum_of_seen(grouped, values, call.visible(i)) if careful else grouped @ values
    return out.reshape(*q.shape[:3], v.shape[3]).to(v.dtype), lse if call.return_lse else None


def attention(q: Tensor, k: Tensor, v: Tensor, form: Form | None, call: Call) -> tuple[Tensor, Tensor | None]:
    """Attention with all logits materialised: (batch, heads, queries, value_dim), and the log-sum-exp."""
    k, v = hide_padding(k, call), hide_padding(v, call)
    careful = needs_care(q, k, v)
    q, k = call.rotated(q, k)
    return rows(q, k, v, form, call, call.i, careful)


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers whose every output bit depends on every input bit."""
    x = x & LOW
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & LOW
    x = ((x ^ (x >> 15)) * 0x735A2D97) & LOW
    return x ^ (x >> 15)


def kept(seed: Tensor, share: float, b: Tensor, h: Tensor, i: Tensor, j: Tensor, heads: int) -> Tensor:
    """Whether each weight is kept: a hash of the seed and of the indices, the same in every backend.

    Nothing is stored: the backward computes it again. It does not depend on threads, blocks, or how a sequence is
    divided. The native kernel has the same function (native/src/dropout.h). b, h, i and j broadcast together.
    """
    head = mix(mix(mix(seed) + (seed >> 32)) + (b * heads + h))
    row = mix(head + i)
    hashed = mix(row + mix(j + 0x9E3779B9))
    return (hashed >> (32 - BITS)).ge(round(share * 2**BITS))


def dropout_factors(call: Call, i: Tensor) -> Tensor:
    """What the weights of the queries `i` are multiplied by, 0 or 1 / (1 − dropout): (batch, heads, rows, keys)."""
    assert call.seed is not None
    b = torch.arange(call.batch, device=i.device)[:, None, None, None]
    h = torch.arange(call.heads, device=i.device)[:, None, None]
    seed = call.seed.to(i.device, non_blocking=True)  # no wait for an accelerator
    return kept(seed, call.dropout, b, h, i[:, None], call.j, call.heads).to(call.dtype) / (1 - call.dropout)
