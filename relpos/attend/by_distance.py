"""How much attention each head pays at each distance, exactly, in memory linear in the length."""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from relpos.attend import native, reference
from relpos.attend.arguments import Position, WeightOptions, check_names, make_call
from relpos.attend.backends import positioned
from relpos.attend.chunks import block_size
from relpos.forms.bias import Form, Positions, distances
from relpos.forms.call import Call, document_ends
from relpos.forms.checks import check_tensors
from relpos.forms.tracing import without_autocast


class Mass(NamedTuple):
    """The attention of each head by distance, as a mean over the queries that see any key.

    Attributes:
        distances: Query minus key, (distances,).
        by_distance: (batch, heads, distances), without what the first tokens of documents get.
        first_key: The share of the first token of the query's document, (batch, heads).
    """

    distances: Tensor
    by_distance: Tensor
    first_key: Tensor


@torch.no_grad()
def mass(
    q: Tensor,
    k: Tensor,
    position: Position | None = None,
    *,
    backend: str | None = None,
    **options: Unpack[WeightOptions],
) -> Mass:
    """Sum the attention weights by distance.

    Many models put much of their attention on the first token, whatever they read (an attention sink). Its share is
    returned apart, so that it does not hide how attention falls with distance.

    Args:
        q: Queries, (batch, heads, queries, head_dim).
        k: Keys, (batch, key_heads, keys, head_dim), not rotated.
        position: An encoding or a form, as in `attention`.
        backend: "native" or "chunks"; if None, the faster that can run this call.
        **options: hidden, gates, causal, window, start, positions, documents, cu_seqlens, padding, mask, sinks, softcap
            and scale, as in `attention`.

    Returns:
        The mass: `by_distance` (batch, heads, distances) with `distances`, and `first_key` (batch, heads), in float32
        at least. For each head both add up to 1; with sinks, to what they leave. A head of which no query sees a key
        has 0.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: Shapes do not match, the encoding needs another argument, or the backend cannot run this call.

    Example:
        >>> mass = relpos.mass(q, k, relpos.encoding("rope", heads=12, head_dim=64))
        >>> nearest = mass.by_distance[:, :, :16].sum(-1)  # (batch, heads): attention to the last 16 tokens
    """
    if backend not in (None, "native", "chunks"):
        raise ValueError(f"the backend of mass is 'native' or 'chunks', not {backend!r}.")
    check_tensors(q, k, None)
    check_names("mass", options, WeightOptions)
    with without_autocast(q.device):
        return mass_of_call(*positioned(q, k, position, make_call(q, k, position, **options)), backend)


def mass_of_call(q: Tensor, k: Tensor, form: Form | None, call: Call, backend: str | None = None) -> Mass:
    """The mass of a call in which the encoding has acted already: what is left is the rotation of the call, if any."""
    reason = native.refuses_mass(q, form, call)
    if backend == "native" and reason:
        raise ValueError(f"the backend 'native' cannot run this: {reason}")
    sums = sums_by_block if reason or backend == "chunks" else native.mass
    by_distance, first_key, rows = sums(q, k, form, call)
    rows = rows.clamp(min=1)
    return Mass(call.distances.long(), by_distance / rows[..., None], first_key / rows)


def sums_by_block(q: Tensor, k: Tensor, form: Form | None, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of the weights, materialised for one block of queries at a time, as `native.mass` returns them."""
    k = reference.hide_padding(k, call)
    careful = reference.needs_care(q, k)
    q, k = call.rotated(q, k)
    size = block_size(q, form, call)
    indices = call.i
    columns = len(call.distances)
    by_distance = q.new_zeros(call.batch, call.heads, columns, dtype=call.dtype)
    first_key, rows = (q.new_zeros(call.batch, call.heads, dtype=call.dtype) for _ in range(2))
    where = None if call.even else Positions(call.query_positions, call.key_positions, call.first)
    first = None if call.documents is None else document_ends(call.documents)[0]  # (batch, keys)
    for start in range(0, call.queries, size):
        i = indices[start : start + size]
        weights, _ = reference.weights(q[:, :, start : start + size], k, form, call, i, careful)
        rows += (weights.sum(-1) > 0).sum(-1)
        if first is None:
            first_key += weights[..., 0].sum(-1)
            weights[..., 0] = 0.0
        else:
            at = first[:, None, i, None].expand(-1, call.heads, -1, -1)  # (batch, heads, rows, 1)
            first_key += weights.gather(-1, at)[..., 0].sum(-1)
            weights.scatter_(-1, at, 0.0)
        column = (distances(where, i, call.j) + call.zero).clamp(0, columns - 1).flatten(1)  # (1 or batch, entries)
        index = column[:, None].expand(call.batch, call.heads, -1)
        by_distance.scatter_add_(2, index, weights.flatten(2))
    return by_distance, first_key, rows
