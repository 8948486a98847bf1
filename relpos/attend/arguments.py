"""Checks of the arguments of attention, and the call that encodings see."""

import math
from itertools import pairwise

import torch
from torch import Tensor

from relpos.forms.call import Call, MaskFunction, check_documents
from relpos.forms.checks import boolean, check_shape, integer_at_least, positive_number
from relpos.forms.encoding import Encoding
from relpos.forms.tracing import has_values

LARGEST_SEED = 2**63 - 1


def make_call(
    q: Tensor,
    k: Tensor,
    position: Encoding | None,
    *,
    hidden: Tensor | None = None,
    gates: Tensor | None = None,
    causal: bool = True,
    documents: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    padding: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    start: int | None = None,
    positions: Tensor | None = None,
    mask: Tensor | MaskFunction | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Call:
    """Check the arguments of `relpos.attention` and make the call that encodings see.

    The arguments have the meanings and shapes of `relpos.attention`; `check_tensors` has checked q and k.

    Returns:
        The call, with the gates that the encoding needs.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape or a value does not match.
    """
    batch, heads, queries, head_dim = q.shape
    keys = k.shape[2]
    boolean("causal", causal)
    if cu_seqlens is not None:
        documents = read_cu_seqlens(cu_seqlens, documents, batch, keys)
    if documents is not None:
        check_documents(documents, batch, keys)
    if padding is not None:
        check_shape("padding", padding, (batch, keys))
        check_boolean("padding", padding, "True for the keys that count")
    places = position.places if isinstance(position, Encoding) else ()
    located = bool({"query and key", "score"} & set(places)) or window is not None or documents is not None
    start = read_start(start, queries, keys, causal, located)
    if window is not None:
        window = read_window(window, keys if start is None else torch.sym_max(keys, start + queries))  # type: ignore[no-untyped-call]
    if positions is not None:
        positions = read_positions(positions, batch, keys, position)
    check_mask(mask, batch, heads, queries, keys)
    if sinks is not None:
        check_shape("sinks", sinks, (heads,))
        if not sinks.is_floating_point():
            raise TypeError(f"sinks must have a floating-point dtype, not {sinks.dtype}.")
        check_finite("vector of sinks", sinks)
    if position is not None:
        gates = check_position(position, batch, heads, head_dim, keys, hidden, gates, causal)
    dtype = torch.promote_types(q.dtype, torch.float32)
    call = Call(
        queries,
        keys,
        causal,
        documents,
        padding,
        gates,
        q.to(dtype) if position is not None and position.needs_scores else None,
        head_dim**-0.5 if scale is None else positive_number("scale", scale),
        dtype,
        q.device,
        start,
        window,
        positions,
        mask,
        None if softcap is None else positive_number("softcap", softcap),
        sinks,
        *read_dropout(dropout, seed),
        return_lse=return_lse,
        batch=batch,
        heads=heads,
    )
    reasons = {"documents": documents is not None, "positions": positions is not None}
    if position is not None:
        reasons[f"the running sums of {type(position).__name__}"] = position.needs_hidden
    for reason, needs_it in reasons.items():
        if needs_it and not call.among_keys:
            raise ValueError(
                f"the {queries} queries from index {call.first} on do not stand among the {keys} keys, but {reason} "
                "have values for keys only: give keys for these queries too, or leave that out."
            )
    return call


def check_boolean(name: str, x: Tensor, meaning: str) -> None:
    """Refuse a mask that is not boolean.

    Raises:
        TypeError: The dtype is another.
    """
    if x.dtype != torch.bool:
        raise TypeError(f"{name} must be boolean, {meaning}, not {x.dtype}: use {name}.bool().")


def read_window(window: int | tuple[int, int], tokens: int) -> tuple[int, int]:
    """Tokens before and after its own that a query sees, from the argument `window`.

    Args:
        window: The argument.
        tokens: Number of indices that occur. A wider window means no limit, and is reduced to it: sums of an index and
            a huge number (`sys.maxsize`) would overflow.

    Raises:
        ValueError: It is neither an integer of at least 0 nor a pair of them.
    """
    pair = tuple(window) if isinstance(window, tuple | list) else (window, window)
    if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in pair):
        raise ValueError(
            f"window must be the number of tokens that a query sees before its own, or (before, after), not {window!r}."
        )
    # sym_min: where sizes are symbols of a traced graph, Python's min would restrict them to one side of the window.
    return torch.sym_min(pair[0], tokens), torch.sym_min(pair[1], tokens)  # type: ignore[no-untyped-call]


def read_start(start: int | None, queries: int, keys: int, causal: bool, matters: bool) -> int | None:
    """Index of the first query, None for the default: the queries are the last tokens.

    Args:
        start: The argument.
        queries: Number of queries.
        keys: Number of keys.
        causal: Whether a query sees only keys up to its own position.
        matters: Whether anything but causality depends on where the queries stand.

    Raises:
        ValueError: It is no integer of at least 0, or it is missing where nothing says where the queries stand.
    """
    if start is not None:
        return integer_at_least("start", start, least=0)
    if queries == keys:
        return None
    if causal:
        if queries > keys:
            raise ValueError(
                f"there are {queries} queries but {keys} keys: in causal attention the queries are the last tokens of "
                "the keys. Give start= (the index of the first query), or causal=False for cross attention."
            )
        return None
    if matters:
        raise ValueError(
            f"there are {queries} queries and {keys} keys, and causal=False: give start=, the index of the first query "
            "on the axis of the keys (keys − queries if the queries are the last tokens)."
        )
    return 0


def read_positions(positions: Tensor, batch: int, keys: int, position: Encoding | None) -> Tensor:
    """Given positions of the tokens, checked, int64: (1 or batch, keys), or (1 or batch, keys, axes).

    Raises:
        TypeError: They are no integers.
        ValueError: The shape does not fit the keys or the encoding.
    """
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions must be a tensor, not {type(positions).__name__}.")
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(f"positions must be integers, one per token, not {positions.dtype}.")
    axes = 1 if position is None else position.axes
    if positions.dim() == 1:
        positions = positions[None]
    if positions.dim() == 3 and positions.shape[2] == axes == 1:
        positions = positions[..., 0]
    shape = tuple(positions.shape)
    if shape[:1] not in ((1,), (batch,)) or shape[1:] not in ((keys,), (keys, axes) if axes > 1 else (keys,)):
        expected = f"({batch}, {keys})" + (f" or ({batch}, {keys}, {axes})" if axes > 1 else "")
        raise ValueError(
            f"positions must be {expected}, or one row for the whole batch, not {shape}: one position for each key"
            f"{', or one for each of its axes' if axes > 1 else ''}."
        )
    return positions.long()  # differences of small integer types would wrap around


def check_mask(mask: Tensor | MaskFunction | None, batch: int, heads: int, queries: int, keys: int) -> None:
    """Check a mask: boolean, and broadcastable to (batch, heads, queries, keys); or a function.

    Raises:
        TypeError: It is neither a boolean tensor nor a function.
        ValueError: The shape does not broadcast.
    """
    if mask is None or (callable(mask) and not isinstance(mask, Tensor)):
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a boolean tensor or a function (b, h, i, j) -> seen, not {mask!r}.")
    check_boolean("mask", mask, "True where a query may see a key")
    sizes = (batch, heads, queries, keys)
    fits = 2 <= mask.dim() <= 4 and all(
        mine in (1, size) for mine, size in zip(mask.shape[::-1], sizes[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"mask must broadcast to (batch, heads, queries, keys) = {sizes}, not {tuple(mask.shape)}.")


def read_dropout(dropout: float, seed: int | Tensor | None) -> tuple[float, Tensor | None]:
    """Share of the weights to drop, and the seed as a tensor; a new seed from PyTorch's generator if none was given.

    Raises:
        ValueError: The share is not from 0 to below 1, or the seed is no integer from 0 to 2^63 − 1.
    """
    if not isinstance(dropout, int | float) or isinstance(dropout, bool) or not 0 <= dropout < 1:
        raise ValueError(f"dropout must be a number from 0 to below 1, not {dropout!r}.")
    if not dropout:
        return 0.0, None
    if seed is None:
        return float(dropout), torch.randint(LARGEST_SEED, (), dtype=torch.int64)
    if isinstance(seed, Tensor):
        if seed.dim() or seed.dtype != torch.int64 or seed.device.type not in ("cpu", "meta"):
            raise ValueError("seed must be an integer, or a 0-d int64 tensor on the CPU.")
        return float(dropout), seed
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed must be an integer from 0 to 2^63 − 1, not {seed!r}.")
    return float(dropout), torch.tensor(seed, dtype=torch.int64)


def read_cu_seqlens(cu_seqlens: Tensor, documents: Tensor | None, batch: int, keys: int) -> Tensor:
    """Ids of packed documents, (1, keys), from their boundaries as flash-attention has them.

    Args:
        cu_seqlens: (documents + 1,), ascending from 0 to the number of tokens.
        documents: The other way to say the same, which must be None.
        batch: Must be 1: all documents stand in one row.
        keys: Number of tokens.

    Raises:
        TypeError: They are no integers.
        ValueError: They do not divide the tokens.
    """
    if documents is not None:
        raise ValueError("documents and cu_seqlens say the same: give one of the two.")
    check_shape("cu_seqlens", cu_seqlens, ("documents + 1",))
    if cu_seqlens.is_floating_point() or cu_seqlens.is_complex() or cu_seqlens.dtype == torch.bool:
        raise TypeError(f"cu_seqlens must be integers, not {cu_seqlens.dtype}.")
    if batch != 1:
        raise ValueError(f"cu_seqlens divide one row of tokens, but the batch is {batch}: put all tokens into one row.")
    if has_values(cu_seqlens) and cu_seqlens.device.type == "cpu":
        ends = cu_seqlens.tolist()
        if len(ends) < 2 or (ends[0], ends[-1]) != (0, keys) or any(a > b for a, b in pairwise(ends)):
            raise ValueError(f"cu_seqlens must ascend from 0 to the number of tokens, {keys}, not {ends[:8]}…")
    tokens = torch.arange(keys, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(tokens, cu_seqlens[1:], right=True)[None]


def check_position(
    position: Encoding,
    batch: int,
    heads: int,
    head_dim: int,
    keys: int,
    hidden: Tensor | None,
    gates: Tensor | None,
    causal: bool,
) -> Tensor | None:
    """Check that the encoding fits q, and return the gates it needs, (batch, heads, keys, gate_size), or None."""
    if not isinstance(position, Encoding):
        raise TypeError(f"position must be an encoding (relpos.encoding(name, …)), not {position!r}.")
    name = type(position).__name__
    if position.heads != heads or position.head_dim != head_dim:
        raise ValueError(
            f"{name} was made for {position.heads} heads, head_dim {position.head_dim}, but q has {heads} heads, "
            f"head_dim {head_dim}."
        )
    return position.read_gates(batch, keys, causal, hidden, gates)


def check_finite(name: str, numbers: Tensor) -> None:
    """Refuse NaN and +inf in a tensor of an encoding; −inf is allowed, as a mask.

    Raises:
        ValueError: The tensor holds NaN or +inf.
    """
    if numbers.device.type != "cpu" or not has_values(numbers):
        return  # reading values would stall an accelerator
    # One reduction: the maximum is NaN if any entry is, and +inf if any is.
    top = float(numbers.detach().max())
    if math.isnan(top) or top == math.inf:
        raise ValueError(f"the {name} holds {top}: a parameter or an input of the encoding is broken.")
