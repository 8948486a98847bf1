"""One call of attention, as an encoding sees it."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.encodings.tracing import has_values


@dataclass(frozen=True)
class Call:
    """Who attends to whom, and where they stand.

    Tokens are counted along the keys; the queries are the last `queries` of them (fewer than keys: decoding with a
    cache). With `documents`, positions start anew at each document.
    """

    queries: int
    keys: int
    causal: bool = True
    documents: Tensor | None = None  # (batch, keys), an id a token, each document in one piece
    padding: Tensor | None = None  # (batch, keys), False where a key must not be seen
    gates: Tensor | None = None  # (batch, heads, keys, numbers), from Encoding.gates
    q: Tensor | None = None  # (batch, heads, queries, head_dim)
    scale: float = 1.0  # scores = scale · q·k
    dtype: torch.dtype = torch.float32  # of tables, distances and gates: float32, or float64 where q is
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def with_gates(self, gates: Tensor | None) -> "Call":
        """The same call with other gates."""
        return replace(self, gates=gates)

    @property
    def j(self) -> Tensor:
        """Index of every key in the sequence: (keys,)."""
        return torch.arange(self.keys, device=self.device)

    @property
    def i(self) -> Tensor:
        """Index of every query in the sequence: (queries,)."""
        return self.j[self.keys - self.queries :]

    @property
    def positions(self) -> Tensor:
        """Position of every token in its document: (1 or batch, keys)."""
        return positions(self.keys, self.documents, self.device)

    @property
    def lengths(self) -> Tensor:
        """Length, so far, of the document every token stands in: (1 or batch, keys)."""
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
        """Every distance i − j that can be seen, in order: (keys,), or (2·keys − 1,) when not causal."""
        first = 0 if self.causal else 1 - self.keys
        return torch.arange(first, self.keys, device=self.device, dtype=self.dtype)

    def visible(self, i: Tensor) -> Tensor:
        """Which keys the queries `i` may see: (1 or batch, 1, rows, keys)."""
        seen = torch.ones(1, 1, len(i), self.keys, dtype=torch.bool, device=self.device)
        if self.causal:
            seen = seen & (i[:, None] >= self.j)
        if self.documents is not None:
            seen = seen & (self.documents[:, i, None] == self.documents[:, None, :])[:, None]
        if self.padding is not None:
            seen = seen & self.padding[:, None, None, :]
        return seen


def positions(length: int, documents: Tensor | None, device: torch.device) -> Tensor:
    """Position of every token in its document: (1 or batch, length)."""
    index = torch.arange(length, device=device)[None]
    return index if documents is None else index - document_ends(documents)[0]


def document_ends(documents: Tensor) -> tuple[Tensor, Tensor]:
    """The first token, and one past the last token, of the document of every token: (batch, keys) each."""
    keys = documents.shape[1]
    index = torch.arange(keys, device=documents.device).expand_as(documents)
    changes = documents[:, 1:] != documents[:, :-1]
    starts, ends = F.pad(changes, (1, 0), value=True), F.pad(changes, (0, 1), value=True)
    first = torch.where(starts, index, 0).cummax(dim=1).values
    last = torch.where(ends, index, keys).flip(1).cummin(dim=1).values.flip(1)
    return first, last + 1


def check_documents(documents: Tensor, batch: int, keys: int) -> None:
    """Ids of packed documents: one a key, each document in one piece."""
    if documents.shape != (batch, keys):
        raise ValueError(f"documents must be (batch, keys) = ({batch}, {keys}), not {tuple(documents.shape)}.")
    if documents.is_floating_point() or documents.is_complex():
        raise TypeError(f"documents must be whole numbers, one id a token, not {documents.dtype}.")
    if not has_values(documents):
        return
    runs = (documents[:, 1:] != documents[:, :-1]).sum(1) + 1
    ordered = documents.sort(dim=1).values
    distinct = (ordered[:, 1:] != ordered[:, :-1]).sum(1) + 1
    if bool((runs != distinct).any()):
        row = int((runs != distinct).nonzero()[0])
        raise ValueError(
            f"documents must be packed one after another, but in row {row} an id comes back after another one."
        )


def products(q: Tensor, k: Tensor) -> Tensor:
    """q·k for every query and key, each key head serving heads / key_heads query heads: (batch, heads, rows, keys)."""
    batch, heads, rows, head_dim = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, rows, head_dim)  # (batch, key_heads, group, rows, head_dim)
    return (grouped @ k[:, :, None].transpose(-1, -2)).reshape(batch, heads, rows, k.shape[2])
