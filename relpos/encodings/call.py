"""One call of attention, as an encoding sees it."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.encodings.checks import check_shape
from relpos.encodings.tracing import has_values


@dataclass(frozen=True)
class Call:
    """Which queries attend to which keys, and their positions.

    Tokens are counted along the keys; the queries are the last `queries` of them. With fewer queries than keys this is
    decoding with a cache. With `documents`, positions restart at 0 in each document.
    """

    queries: int
    keys: int
    causal: bool = True
    documents: Tensor | None = None  # (batch, keys), one id per token, each document contiguous
    padding: Tensor | None = None  # (batch, keys), False where a key must not be seen
    gates: Tensor | None = None  # (batch, heads, keys, gate_size), from Encoding.gates
    q: Tensor | None = None  # (batch, heads, queries, head_dim)
    scale: float = 1.0  # scores = scale · q·k
    dtype: torch.dtype = torch.float32  # of tables, distances and gates: float32, or float64 where q is
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def with_gates(self, gates: Tensor | None) -> "Call":
        """A copy of this call with other gates."""
        return replace(self, gates=gates)

    @property
    def j(self) -> Tensor:
        """Index of each key in the sequence: (keys,)."""
        return torch.arange(self.keys, device=self.device)

    @property
    def i(self) -> Tensor:
        """Index of each query in the sequence: (queries,)."""
        return self.j[self.keys - self.queries :]

    @property
    def positions(self) -> Tensor:
        """Position of each token in its document: (1 or batch, keys)."""
        return positions(self.keys, self.documents, self.device)

    @property
    def lengths(self) -> Tensor:
        """Current length of the document that each token belongs to: (1 or batch, keys)."""
        if self.documents is None:
            return torch.full((1, self.keys), self.keys, device=self.device)
        first, end = document_ends(self.documents)
        return end - first

    @property
    def zero(self) -> int:
        """Column of distance 0 in `distances`."""
        return 0 if self.causal else self.keys - 1

    @property
    def distances(self) -> Tensor:
        """All distances i − j that occur, ascending: (keys,), or (2·keys − 1,) if not causal."""
        first = 0 if self.causal else 1 - self.keys
        return torch.arange(first, self.keys, device=self.device, dtype=self.dtype)

    def visible(self, i: Tensor) -> Tensor:
        """Which keys the queries at the indices `i` (rows,) may see: (1 or batch, 1, rows, keys)."""
        seen = torch.ones(1, 1, len(i), self.keys, dtype=torch.bool, device=self.device)
        if self.causal:
            seen = seen & (i[:, None] >= self.j)
        if self.documents is not None:
            seen = seen & (self.documents[:, i, None] == self.documents[:, None, :])[:, None]
        if self.padding is not None:
            seen = seen & self.padding[:, None, None, :]
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
    """Check ids of packed documents: one integer per key, each document contiguous.

    Raises:
        TypeError: The ids are no integers.
        ValueError: The shape is not (batch, keys), or an id occurs again after another one.
    """
    check_shape("documents", documents, (batch, keys))
    if documents.is_floating_point() or documents.is_complex():
        raise TypeError(f"documents must be integers, one id per token, not {documents.dtype}.")
    if not has_values(documents):
        return
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
