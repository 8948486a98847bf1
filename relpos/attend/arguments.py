"""The arguments of attention: one typed list, checked here once, and the call that encodings and backends see."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from relpos.forms.bias import Form, RankOne, terms
from relpos.forms.call import Call, MaskFunction, check_documents
from relpos.forms.checks import boolean, check_shape, integer_at_least, positive_number
from relpos.forms.encoding import Encoding
from relpos.forms.tracing import has_values
from relpos.system.errors import unknown

LARGEST_SEED = 2**63 - 1
ELSEWHERE = {  # arguments of other attention functions: what to write here
    "is_causal": "write causal=, which is True by default.",
    "attn_mask": "write mask= for a boolean mask, True where a query may see a key, or padding= for keys that nobody "
    "sees; numbers that are added to the scores are a bias: give position= a form such as relpos.Toeplitz(table).",
    "attention_mask": "write padding=, boolean (batch, keys), False for keys that must not be seen.",
    "key_padding_mask": "write padding=, boolean (batch, keys), False for keys that must not be seen: its inverse.",
    **dict.fromkeys(("dropout_p", "attention_dropout"), "write dropout=."),
    **dict.fromkeys(
        ("num_heads", "n_heads", "heads"),
        "the heads are the second dimension of q, (batch, heads, queries, head_dim), and an argument of "
        "relpos.encoding(name, heads=, head_dim=).",
    ),
    **dict.fromkeys(
        ("theta", "rope_theta", "base"), 'it belongs to the encoding: relpos.encoding("rope", heads, head_dim, base=).'
    ),
    **dict.fromkeys(("softmax_scale", "scaling"), "write scale=."),
    **dict.fromkeys(("sliding_window", "window_size"), "write window=, the tokens before its own that a query sees."),
    "enable_gqa": "leave it out: k and v may have fewer heads than q.",
    "score_mod": "a bias is an encoding or a form, position=; a cap of the scores is softcap=.",
    "block_mask": "write mask=, a boolean tensor or a function (b, h, i, j) -> seen.",
}
Position = Encoding | Form


class ScoreOptions(TypedDict, total=False):
    """The arguments of `relpos.attention` that decide the scores; its docstring explains them."""

    hidden: Tensor | None
    gates: Tensor | None
    causal: bool
    window: int | tuple[int, int] | None
    start: int | None
    positions: Tensor | None
    documents: Tensor | None
    cu_seqlens: Tensor | None
    padding: Tensor | None
    mask: Tensor | MaskFunction | None
    softcap: float | None
    scale: float | None


class WeightOptions(ScoreOptions, total=False):
    """Those that decide the weights."""

    sinks: Tensor | None


class AttentionOptions(WeightOptions, total=False):
    """All of them."""

    dropout: float
    seed: int | Tensor | None
    return_lse: bool


@dataclass(frozen=True)
class RotaryFrequencies:
    """How queries and keys are rotated: by this many radians per token in each pair of dimensions."""

    frequencies: Tensor  # (pairs,); dimensions from 2 · pairs on are not rotated
    layout: str  # which dimensions form pair m: m and m + pairs ("half"), or 2m and 2m + 1 ("interleaved")


@dataclass(frozen=True)
class LayerCall:
    """The queries and keys of one attention layer of a model on one input, and how it attends."""

    q: Tensor  # (1, heads, length, head_dim)
    k: Tensor  # (1, key_heads, length, head_dim)
    position: Encoding | None  # acts on them; None if nothing is left to do, as for keys that come rotated
    arguments: Mapping[str, Any]  # further ones of `relpos.attention`: hidden, causal, window, scale, …
    turned: RotaryFrequencies | None = None  # how q and k were rotated before, if that is known


def check_names(function: str, options: Mapping[str, object], allowed: type, *more: str) -> None:
    """Refuse arguments that a function does not have: others than the keys of `allowed`, and `more`."""
    names: set[str] = {*allowed.__optional_keys__, *more}  # type: ignore[attr-defined]
    for name in options:
        if name not in names and name in ELSEWHERE:
            raise TypeError(f"{function} has no argument {name!r}: {ELSEWHERE[name]}")
        if name not in names:
            raise TypeError(str(unknown(f"argument of {function}", name, names)))


def make_call(q: Tensor, k: Tensor, position: Position | None, **options: Unpack[AttentionOptions]) -> Call:
    """Check the arguments of `relpos.attention` and make the call, with the gates that the encoding needs.

    `check_tensors` has checked q and k.
    """
    check_names("attention", options, AttentionOptions)
    batch, heads, queries, head_dim = q.shape
    keys = k.shape[2]
    causal = boolean("causal", options.get("causal", True))
    documents, padding, window = options.get("documents"), options.get("padding"), options.get("window")
    positions, mask, sinks = options.get("positions"), options.get("mask"), options.get("sinks")
    softcap, scale, cu_seqlens = options.get("softcap"), options.get("scale"), options.get("cu_seqlens")
    if cu_seqlens is not None:
        documents = read_cu_seqlens(cu_seqlens, documents, batch, keys)
    if documents is not None:
        check_documents(documents, batch, keys)
    if padding is not None:
        check_shape("padding", padding, (batch, keys))
        check_boolean("padding", padding, "True for the keys that count")
    gates = check_position(q, keys, position, options)
    start = options.get("start")
    if start is None and queries != keys and not causal:
        acts = isinstance(position, Form) or (position is not None and position.places not in ((), ("embedding",)))
        start = read_start(None, queries, keys, causal, acts or window is not None or documents is not None)
    else:
        start = read_start(start, queries, keys, causal)
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
    dropout, seed = read_dropout(options.get("dropout", 0.0), options.get("seed"))
    dtype = torch.promote_types(q.dtype, torch.float32)
    call = Call(
        queries,
        keys,
        causal=causal,
        documents=documents,
        padding=padding,
        gates=gates,
        q=q.to(dtype) if isinstance(position, Encoding) and position.needs_scores else None,
        scale=head_dim**-0.5 if scale is None else positive_number("scale", scale),
        dtype=dtype,
        device=q.device,
        start=start,
        window=window,
        token_positions=positions,
        mask=mask,
        softcap=None if softcap is None else positive_number("softcap", softcap),
        sinks=sinks,
        dropout=dropout,
        seed=seed,
        return_lse=options.get("return_lse", False),
        batch=batch,
        heads=heads,
    )
    if not call.among_keys:
        check_per_key(call, position)
    return call


def check_per_key(call: Call, position: Position | None) -> None:
    """Refuse queries outside the keys where something has values for keys only."""
    reasons = {"documents": call.documents is not None, "positions": call.token_positions is not None}
    if isinstance(position, Encoding):
        reasons[f"the running sums of {type(position).__name__}"] = position.needs_hidden
    else:
        reasons["the running sums of RankOne"] = any(isinstance(term, RankOne) for term in terms(position))
    for reason, needs_keys in reasons.items():
        if needs_keys:
            raise ValueError(
                f"the {call.queries} queries from index {call.first} on lie outside the {call.keys} keys, but {reason} "
                "have values for keys only: give keys for these queries too, or leave that out."
            )


def check_boolean(name: str, x: Tensor, meaning: str) -> None:
    """Refuse a mask that is not boolean."""
    if x.dtype != torch.bool:
        raise TypeError(f"{name} must be boolean, {meaning}, not {x.dtype}: use {name}.bool().")


def read_window(window: int | tuple[int, int], tokens: int) -> tuple[int, int]:
    """Tokens before and after its own that a query sees, at most the number of indices that occur."""
    pair = tuple(window) if isinstance(window, tuple | list) else (window, window)
    if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in pair):
        raise ValueError(
            f"window must be the number of tokens that a query sees before its own, or (before, after), not {window!r}."
        )
    # Sums of an index and a huge number (`sys.maxsize`, for no limit) would overflow.
    # sym_min: where sizes are symbols of a traced graph, Python's min would restrict them to one side of the window.
    return torch.sym_min(pair[0], tokens), torch.sym_min(pair[1], tokens)  # type: ignore[no-untyped-call]


def read_start(start: int | None, queries: int, keys: int, causal: bool, matters: bool = False) -> int | None:
    """Index of the first query, None for the last tokens; `matters` if more than causality depends on it."""
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


def read_positions(positions: Tensor, batch: int, keys: int, position: Position | None) -> Tensor:
    """Given positions of the tokens, checked, int64: (1 or batch, keys), or (1 or batch, keys, axes)."""
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions must be a tensor, not {type(positions).__name__}.")
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(f"positions must be integers, one per token, not {positions.dtype}.")
    axes = position.axes if isinstance(position, Encoding) else 1
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
    """Check a mask: boolean, and broadcastable to (batch, heads, queries, keys); or a function."""
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
    """Share of the weights to drop, and the seed as a tensor; a new seed from PyTorch's generator if none was given."""
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
    """Ids of packed documents, (1, keys), from their boundaries as flash-attention has them."""
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


def check_position(q: Tensor, keys: int, position: Position | None, options: ScoreOptions) -> Tensor | None:
    """Check that the encoding fits q, and return the gates it needs, (batch, heads, keys, gate_size), or None."""
    if position is None or isinstance(position, Form):
        return None
    if not isinstance(position, Encoding):
        raise TypeError(
            "position must be an encoding (relpos.encoding(name, …)), or a form of a bias such as "
            f"relpos.Toeplitz(table), not {position!r}."
        )
    batch, heads, _, head_dim = q.shape
    if position.heads != heads or position.head_dim != head_dim:
        turned = (q.shape[2], head_dim) == (position.heads, position.head_dim)
        advice = (
            f" Its shape {tuple(q.shape)} looks like (batch, length, heads, head_dim), and it must be (batch, heads, "
            "length, head_dim): give q.transpose(1, 2), and k and v likewise."
        )
        raise ValueError(
            f"{type(position).__name__} was made for {position.heads} heads, head_dim {position.head_dim}, but q has "
            f"{heads} heads, head_dim {head_dim}.{advice if turned else ''}"
        )
    return position.read_gates(batch, keys, options.get("causal", True), options.get("hidden"), options.get("gates"))


def check_finite(name: str, numbers: Tensor) -> None:
    """Refuse NaN and +inf in a tensor of an encoding; −inf is allowed, as a mask."""
    if numbers.device.type != "cpu" or not has_values(numbers):
        return  # reading values would stall an accelerator
    # One reduction: the maximum is NaN if any entry is, and +inf if any is.
    top = float(numbers.detach().max())
    if math.isnan(top) or top == math.inf:
        raise ValueError(f"the {name} holds {top}: a parameter or an input of the encoding is broken.")
