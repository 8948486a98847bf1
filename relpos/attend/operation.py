"""Attention with any encoding, as one operation."""

from typing import TYPE_CHECKING, Any, Never, Unpack

import torch
from torch import Tensor

from relpos.attend import reference
from relpos.attend.arguments import AttentionOptions, Position, ScoreOptions, check_names, make_call
from relpos.attend.backends import attend, positioned
from relpos.attend.cache import Cache
from relpos.forms.call import MaskFunction
from relpos.forms.checks import check_tensors
from relpos.forms.tracing import without_autocast

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Position | None = None,
    *,
    hidden: Tensor | None = None,
    gates: Tensor | None = None,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    start: int | None = None,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    padding: Tensor | None = None,
    mask: Tensor | MaskFunction | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    cache: Cache | None = None,
    group: "ProcessGroup | None" = None,
    scheme: str | None = None,
    **others: Never,
) -> Any:
    """Compute attention with a positional encoding.

    Tokens are counted along the keys: key j has the index j, and query number r has the index start + r.

    Args:
        q: Queries, (batch, heads, queries, head_dim). In causal attention with fewer queries than keys they are the
            last tokens (decoding with a cache), unless `start` says otherwise.
        k: Keys, (batch, key_heads, keys, head_dim), not rotated. Each key head serves heads / key_heads heads.
        v: Values, (batch, key_heads, keys, value_dim).
        position: An encoding from `relpos.encoding`. It rotates q and k and adds its bias here. An encoding of the
            embedding does nothing here: call `position.embed` on the token embeddings before. Or a bias of your own as
            a form: `relpos.Toeplitz(table)`, `RankOne`, `Scaled`, `Projected`, `Scored`, or a sum of them (`+`).
        hidden: The layer's normalised input, (batch, keys, width), for encodings that read it.
        gates: `position.gates(hidden)`, (batch, heads, keys, gate_size), in place of hidden: what a cache keeps while
            decoding.
        causal: Whether a query sees only keys up to its own index.
        window: How many tokens before its own a query sees (and, if not causal, as many after it), or a pair (before,
            after). Any integer, also `sys.maxsize` for no limit. `sliding_window` of transformers counts the token
            itself: window = sliding_window − 1.
        start: Index of the first query. Needed in cross attention (causal=False, numbers of queries and keys differ)
            if the encoding, the window or the documents depend on where the queries stand.
        positions: Position of each token, integers (batch, keys) or (1, keys), in place of 0, 1, 2, …; with gaps if you
            like, or descending. For rotations in several dimensions (batch, keys, axes). Masks and windows still
            count tokens.
        documents: Ids of packed documents, integers (batch, keys). There is no attention across documents, and
            positions restart at 0 in each.
        cu_seqlens: The same as boundaries, as in flash-attention: integers (documents + 1,) from 0 to keys; batch 1.
        padding: Boolean (batch, keys), False for keys that must not be seen. It changes no position.
        mask: Any other mask: boolean, broadcastable to (batch, heads, queries, keys), True where a query
            may see a key; or a function (b, h, i, j) -> seen of broadcastable index tensors, as FlexAttention's
            mask_mod. On a CPU the backend "chunks" runs it, which is slower than "native".
        sinks: One learnable logit per head, (heads,), that joins each softmax and carries no value.
        softcap: Replaces the scaled scores s by softcap · tanh(s / softcap), as Gemma-2 does; before the bias is added.
        dropout: Share of the weights that is dropped; the others are divided by 1 − dropout.
        seed: Of the dropout: an integer, or a 0-d int64 tensor. What is dropped depends on it and on the indices alone.
            If None, it is drawn from PyTorch's generator.
        scale: Factor of q·k; head_dim^−½ if None. The bias is not scaled.
        return_lse: Whether to return the log-sum-exp of each row too.
        backend: "native", "flex", "triton", "chunks" or "reference"; if None, the fastest that can run this call. On
            CUDA and ROCm that is "flex"; "triton" where "flex" cannot run the call, where the environment has
            RELPOS_GPU=triton, and where torch.use_deterministic_algorithms(True) is set and the bias wants a gradient,
            which "flex" adds up in any order (docs/gpu.md).
        cache: A `relpos.Cache` of earlier tokens. Then q, k, v, and hidden or gates, are those of the new tokens, which
            are added to it, and the keys are all tokens so far, of which positions, documents and padding are.
        group: Processes of torch.distributed among which the sequence is divided: each passes its slice of q, k, v,
            hidden or gates, documents, padding and positions, and gets the output of its slice. The slices are equally
            long and in the order of the ranks; indices, and `cu_seqlens`, count the tokens of the whole sequence.
            Gradients of q, k, v and hidden are those of the slice. Those of parameters (of the encoding, and sinks) are
            this process's share: their sum over the group is the gradient (docs/scale.md).
        scheme: How the processes of a group divide the work. "heads": each computes the whole sequence for some heads;
            "ring": keys and values travel from process to process; "gather": each gathers all of them. If None, the
            first of these that can run this call. What a scheme cannot run it refuses: docs/scale.md has the table.
        **others: None. An argument of another library's attention, such as is_causal, is refused with the right name.

    Returns:
        (batch, heads, queries, value_dim) in the dtype of v, computed in float32 at least. A query that may see no key
        gets 0. Keys and values that a query may not see do not count, whatever they hold: docs/attention.md says what
        is promised of NaN. With `return_lse`, also the natural log-sum-exp of the logits (sinks included), (batch,
        heads, queries) in float32 at least, −inf for a query that sees nothing; gradients flow through it.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: Shapes do not match, the encoding needs another argument, or the backend cannot run this call.

    Example:
        >>> position = relpos.encoding("cable", heads=12, head_dim=64)
        >>> out = relpos.attention(q, k, v, position, hidden=x, window=1023)
        >>> part = relpos.attention(q, k, v, position, hidden=x, group=torch.distributed.group.WORLD)  # of a slice each
    """
    if others:
        check_names("attention", others, AttentionOptions, "backend", "cache", "group", "scheme")
    check_tensors(q, k, v)
    options: AttentionOptions = {
        "hidden": hidden,
        "gates": gates,
        "causal": causal,
        "window": window,
        "start": start,
        "positions": positions,
        "documents": documents,
        "cu_seqlens": cu_seqlens,
        "padding": padding,
        "mask": mask,
        "sinks": sinks,
        "softcap": softcap,
        "dropout": dropout,
        "seed": seed,
        "scale": scale,
        "return_lse": return_lse,
    }
    if group is None and scheme is not None:
        raise ValueError(f"scheme={scheme!r} says how the processes of a group divide the work: give group= too.")
    if group is not None and (cache is not None or start is not None):
        raise ValueError(
            "with a group every process attends from its slice of the sequence, and there is no decoding: leave "
            f"{'cache' if cache is not None else 'start'}= out."
        )
    if cache is not None and not isinstance(cache, Cache):
        raise TypeError(f"cache must be a relpos.Cache(), not {cache!r}.")
    with without_autocast(q.device):
        if group is not None:
            # Imported here: builds of PyTorch without torch.distributed have no process groups.
            from relpos.attend.parallel import attention_over_slices  # noqa: PLC0415

            out, lse = attention_over_slices(q, k, v, position, group, scheme, backend, options)
        elif cache is not None:
            out, lse = cache.attention(q, k, v, position, backend, options)
        else:
            out, lse = attend(q, k, v, position, make_call(q, k, position, **options), backend)
    return (out, lse) if return_lse else out


def scores(q: Tensor, k: Tensor, position: Position | None = None, **options: Unpack[ScoreOptions]) -> Tensor:
    """Compute the attention scores before the softmax, to look at them. This materialises queries × keys values.

    Args:
        q: Queries, (batch, heads, queries, head_dim).
        k: Keys, (batch, key_heads, keys, head_dim), not rotated.
        position: An encoding or a form, as in `attention`.
        **options: hidden, gates, causal, window, start, positions, documents, cu_seqlens, padding, mask, softcap and
            scale, as in `attention`.

    Returns:
        (batch, heads, queries, keys), −inf where a key is not seen.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: Shapes do not match, or the encoding needs another argument.

    Example:
        >>> weights = relpos.scores(q, k, relpos.encoding("alibi", heads=12, head_dim=64)).softmax(-1)
    """
    check_tensors(q, k, None)
    check_names("scores", options, ScoreOptions)
    with without_autocast(q.device):
        q, k, form, call = positioned(q, k, position, make_call(q, k, position, **options))
        k = reference.hide_padding(k, call)
        careful = reference.needs_care(q, k)
        logits, visible = reference.logits(*call.rotated(q, k), form, call, call.i, careful)
        return logits.masked_fill(~visible, -torch.inf)
