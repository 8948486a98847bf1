"""One call of attention, as an encoding and a backend see it."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.forms.checks import check_shape
from relpos.forms.rotation import Rotation
from relpos.forms.tracing import has_values

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (batch, head, query, key) -> seen


@dataclass(frozen=True)
class Call:
    """Which queries attend to which keys, their positions, and what happens to the weights.

    Tokens are counted along the keys: key j has the index j, and the queries have the indices first … first + queries
    − 1. By default they are the last tokens; with fewer queries than keys this is decoding with a cache. In cross
    attention they may stand anywhere, also beyond the keys. With `documents`, positions restart at 0 in each document.
    """

    queries: int
    keys: int
    _: KW_ONLY
    causal: bool = True
    documents: Tensor | None = None  # (batch, keys or more), one id per token, each document contiguous
    padding: Tensor | None = None  # (batch, keys), False where a key must not be seen
    gates: Tensor | None = None  # (batch, heads, keys, gate_size), from Encoding.gates
    q: Tensor | None = None  # (batch, heads, queries, head_dim)
    scale: float = 1.0  # scores = scale · q·k
    dtype: torch.dtype = torch.float32  # of tables, distances and gates: float32, or float64 where q is
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    start: int | None = None  # index of the first query; None: the queries are the last tokens
    window: tuple[int, int] | None = None  # how many tokens before and after its own a query sees
    token_positions: Tensor | None = None  # (1 or batch, keys) or (1 or batch, keys, axes); None: counted
    mask: Tensor | MaskFunction | None = None  # broadcasts to (batch, heads, queries, keys), or a function of indices
    softcap: float | None = None  # scores ← softcap · tanh(scores / softcap), before the bias
    sinks: Tensor | None = None  # (heads,), one more logit in each softmax, which carries no value
    dropout: float = 0.0  # share of the weights that is dropped
    seed: Tensor | None = None  # of the dropout: a 0-d int64 tensor on the CPU
    rotation: Rotation | None = None  # to be applied to q and k by the backend
    return_lse: bool = False  # whether the log-sum-exp of each row is computed too
    batch: int = 1
    heads: int = 1
    token_lengths: Tensor | None = None  # (1 or batch, keys), of documents of which the keys are a part; None: counted

    def on_axes(self, axes: int) -> "Call":
        """The call for an encoding with this many axes: with one, it counts tokens where the positions have more."""
        if axes > 1 or self.token_positions is None or self.token_positions.dim() == 2:
            return self
        return replace(self, token_positions=None)

    def rotated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, rotated where the encoding rotates; then in `dtype`, as half precision is too coarse."""
        return (q, k) if self.rotation is None else self.rotation.apply(q.to(self.dtype), k.to(self.dtype))

    @property
    def first(self) -> int:
        """Index of the first query."""
        return self.keys - self.queries if self.start is None else self.start

    @property
    def among_keys(self) -> bool:
        """Whether every query has the index of a key."""
        return self.first >= 0 and self.first + self.queries <= self.keys

    @property
    def j(self) -> Tensor:
        """Index of each key: (keys,)."""
        return torch.arange(self.keys, device=self.device)

    @property
    def i(self) -> Tensor:
        """Index of each query: (queries,)."""
        return torch.arange(self.first, self.first + self.queries, device=self.device)

    @property
    def key_positions(self) -> Tensor:
        """Position of each key, in its document: (1 or batch, keys), or (1 or batch, keys, axes) if given so."""
        if self.token_positions is not None:
            return self.token_positions
        return positions(self.keys, self.documents, self.device)

    @property
    def query_positions(self) -> Tensor:
        """Position of each query, in its document: (1 or batch, queries), or (1 or batch, queries, axes)."""
        if self.token_positions is None and self.documents is None:
            return self.i[None]
        return self.key_positions[:, self.first : self.first + self.queries]

    @property
    def key_lengths(self) -> Tensor:
        """Current length of the document that each key belongs to: (1 or batch, keys)."""
        if self.token_lengths is not None:
            return self.token_lengths
        if self.documents is not None:
            first, end = document_ends(self.documents)
            return end - first
        if self.token_positions is not None:
            flat = self.token_positions.flatten(1)
            return (flat.amax(dim=1, keepdim=True) + 1).expand(-1, self.keys)
        return torch.full((1, self.keys), self.length, device=self.device)

    @property
    def query_lengths(self) -> Tensor:
        """Current length of the document that each query belongs to: (1 or batch, queries)."""
        if self.token_positions is None and self.documents is None:
            return torch.full((1, self.queries), self.length, device=self.device)
        return self.key_lengths[:, self.first : self.first + self.queries]

    @property
    def length(self) -> int:
        """Number of indices that occur, of keys and queries."""
        return max(self.keys, self.first + self.queries)

    @property
    def even(self) -> bool:
        """Whether the distance of two tokens of a document is the difference of their indices.

        That is so unless given positions have gaps; padding on the left may have any positions. Values of a graph or of
        an accelerator are not read: there, given positions may have gaps.
        """
        if self.token_positions is None:
            return True
        if self.token_positions.dim() > 2 or self.device.type != "cpu" or not has_values(self.token_positions):
            return False
        one_apart = self.token_positions.diff(dim=1) == 1
        if self.documents is not None:
            one_apart = one_apart | (self.documents.diff(dim=1) != 0)
        elif self.padding is not None and self.causal:  # padding on the left is seen by nobody, and sees nothing
            one_apart = one_apart | ~self.padding[:, :-1].cummax(dim=1).values
        return bool(one_apart.all())

    @property
    def lowest(self) -> int:
        """The smallest distance in `distances`: 0 if causal, unless given positions descend."""
        if self.even:
            return 0 if self.causal else min(0, self.first - self.keys + 1)
        return self._given_range[0]

    @property
    def highest(self) -> int:
        """The largest distance in `distances`."""
        return max(0, self.first + self.queries - 1 if self.even else self._given_range[1])

    @property
    def zero(self) -> int:
        """Column of distance 0 in `distances`."""
        return -self.lowest

    @property
    def distances(self) -> Tensor:
        """All distances that may occur between a query and a key that it sees, ascending: (distances,)."""
        return torch.arange(self.lowest, self.highest + 1, device=self.device, dtype=self.dtype)

    @cached_property
    def _given_range(self) -> tuple[int, int]:
        """Bounds of the distances of given positions, read once: a read stalls an accelerator.

        In causal attention the smallest is that of a token from one before it in its document that is not padding.
        """
        assert self.token_positions is not None
        at = self.token_positions - self.token_positions.amin()  # (1 or batch, keys)
        spread = at.amax()
        lowest = -spread
        if self.causal:
            base = torch.zeros_like(at[:, :1])
            if self.documents is not None:  # each document lies above those before it
                changes = self.documents[:, 1 : self.keys] != self.documents[:, : self.keys - 1]
                base = F.pad(changes.cumsum(1), (1, 0)) * (spread + 1)
            seen = at + base if self.padding is None else torch.where(self.padding, at + base, base)
            lowest = (at + base - seen.cummax(dim=1).values).amin().clamp(max=0)
        low, high = torch.stack([lowest, spread]).tolist()
        return int(low), int(high)

    def visible(self, i: Tensor, j: Tensor | None = None) -> Tensor:
        """Which keys the queries at the indices `i` (rows,) may see: (1 or batch, 1 or heads, rows, keys)."""
        column, row = i[:, None], self.j if j is None else j
        seen = torch.ones(1, 1, len(i), len(row), dtype=torch.bool, device=self.device)
        if self.causal:
            seen = seen & (column >= row)
        if self.window is not None:
            left, right = self.window
            seen = seen & (row >= column - left) & (row <= column + right)
        if self.documents is not None:
            keys = self.documents[:, : self.keys] if j is None else self.documents[:, j]
            seen = seen & (self.documents[:, i, None] == keys[:, None, :])[:, None]
        if self.padding is not None:
            seen = seen & (self.padding if j is None else self.padding[:, j])[:, None, None, :]
        if isinstance(self.mask, Tensor):
            rows = self.mask if self.mask.shape[-2] == 1 else self.mask.index_select(-2, i - self.first)
            seen = seen & (rows if j is None or rows.shape[-1] == 1 else rows.index_select(-1, j))
        elif self.mask is not None:
            b = torch.arange(self.batch, device=self.device)[:, None, None, None]
            h = torch.arange(self.heads, device=self.device)[:, None, None]
            seen = seen & self.ask_mask(b, h, column, row)
        return seen

    def ask_mask(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """What the function `mask` says of these indices."""
        assert callable(self.mask)
        seen = self.mask(b, h, i, j)
        kind = seen.dtype if isinstance(seen, Tensor) else type(seen)
        if kind not in (torch.bool, bool):
            raise TypeError(
                f"the function mask must return booleans, True where a query may see a key, not {kind}: return a "
                "comparison, or use .bool()."
            )
        return seen


def positions(length: int, documents: Tensor | None, device: torch.device) -> Tensor:
    """Position of each token in its document: (1 or batch, length)."""
    index = torch.arange(length, device=device)[None]
    return index if documents is None else index - document_ends(documents)[0]


def document_ends(documents: Tensor) -> tuple[Tensor, Tensor]:
    """First token of each token's document, and one past its last token: (batch, keys) each."""
    keys = documents.shape[1]
    index = torch.arange(keys, device=documents.device).expand_as(documents)
    changes = documents[:, 1:] != documents[:, :-1]
    starts, ends = F.pad(changes, (1, 0), value=True), F.pad(changes, (0, 1), value=True)
    first = torch.where(starts, index, 0).cummax(dim=1).values
    last = torch.where(ends, index, keys).flip(1).cummin(dim=1).values.flip(1)
    return first, last + 1


def check_documents(documents: Tensor, batch: int, keys: int) -> None:
    """Check ids of packed documents: one integer per key, each document contiguous."""
    check_shape("documents", documents, (batch, keys))
    if documents.is_floating_point() or documents.is_complex():
        raise TypeError(f"documents must be integers, one id per token, not {documents.dtype}.")
    if documents.device.type != "cpu" or not has_values(documents):
        return  # reading values would stall an accelerator
    if bool((documents[:, 1:] >= documents[:, :-1]).all()):
        return  # the usual order; a decoder asks at every step of every layer
    runs = (documents[:, 1:] != documents[:, :-1]).sum(1) + 1
    ordered = documents.sort(dim=1).values
    distinct = (ordered[:, 1:] != ordered[:, :-1]).sum(1) + 1
    if bool((runs != distinct).any()):
        row = int((runs != distinct).nonzero()[0])
        raise ValueError(f"each document must be contiguous, but in row {row} an id occurs again after another one.")


def products(q: Tensor, k: Tensor) -> Tensor:
    """q·k for every query and key: (batch, heads, rows, keys). Each key head serves heads / key_heads query heads."""
    batch, heads, rows, head_dim = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, rows, head_dim)  # (batch, key_heads, group, rows, head_dim)
    return (grouped @ k[:, :, None].transpose(-1, -2)).reshape(batch, heads, rows, k.shape[2])
