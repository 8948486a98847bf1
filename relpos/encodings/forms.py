"""The forms a bias on the scores can take.

An encoding returns its bias as one of these forms, with tensors in its fields; attention knows how to run each form.
`block` is the definition: the bias of the query rows `i` and the key columns `j`, materialised. Fast paths read the
fields instead.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F


class Form(ABC):
    """A bias on the scores."""

    @abstractmethod
    def block(self, i: Tensor, j: Tensor, scores: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        """Materialise the bias of some queries and keys.

        Args:
            i: Indices of the queries, (rows,).
            j: Indices of the keys, (keys,).
            scores: Scaled scores of these queries and keys, (batch, heads, rows, keys). Only `Scored` reads them.
            visible: Which keys each query may see, (1 or batch, 1, rows, keys). Only `Scored` reads it.

        Returns:
            (1 or batch, heads, rows, keys).
        """

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the form, by name."""
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                yield item.name, value


@dataclass(frozen=True)
class Toeplitz(Form):
    """A function of the distance alone: B_ij = table[h, i − j]."""

    table: Tensor  # (heads, distances), over Call.distances
    zero: int  # column of distance 0

    def block(self, i: Tensor, j: Tensor, scores: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        column = i[:, None] - j + self.zero  # (rows, keys)
        # A causal table has no distances of the future; attention masks what is read in their place.
        return self.table[:, column.clamp(0, self.table.shape[1] - 1)][None]


@dataclass(frozen=True)
class RankOne(Form):
    """One weight per query times the growth of a running sum since the key: B_ij = −weight_i · (total_i − total_j)."""

    total: Tensor  # (batch, heads, keys), float64: in float32 a long sum would lose the differences
    weight: Tensor | None  # (batch, heads, keys); None means 1
    dtype: torch.dtype  # of the bias
    symmetric: bool = False  # |total_i − total_j|, for attention in both directions

    def block(self, i: Tensor, j: Tensor, scores: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        gained = self.gained(i, j)
        return -gained if self.weight is None else -self.weight[:, :, i, None] * gained

    def gained(self, i: Tensor, j: Tensor) -> Tensor:
        """total_i − total_j: (batch, heads, rows, keys). It is finite in `dtype` even for huge steps."""
        largest = torch.finfo(self.dtype).max
        gained = (self.total[:, :, i, None] - self.total[:, :, None, j]).clamp(-largest, largest).to(self.dtype)
        return gained.abs() if self.symmetric else gained


@dataclass(frozen=True)
class Scaled(Form):
    """A piecewise-linear function per head of a table over distances, scaled per row.

    B_ij = Σ_u out[h, u] · relu(slope[u] · x_ij + shift[u]) + offset[h],  x_ij = table[i − j] / row[i].
    """

    table: Tensor  # (distances,), causal
    row: Tensor  # (1 or batch, keys)
    slope: Tensor  # (units,)
    shift: Tensor  # (units,)
    out: Tensor  # (heads, units)
    offset: Tensor  # (heads,)

    def block(self, i: Tensor, j: Tensor, scores: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        x = self.table[(i[:, None] - j).clamp(min=0)] / self.row[:, i, None]  # (1 or batch, rows, keys)
        units = F.relu(x[..., None] * self.slope + self.shift)  # (1 or batch, rows, keys, units)
        return (units @ self.out.T + self.offset).movedim(-1, 1)


@dataclass(frozen=True)
class Sum(Form):
    """A sum of biases: B = Σ_t B^(t)."""

    terms: tuple[Form, ...]

    def block(self, i: Tensor, j: Tensor, scores: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        first, *others = (term.block(i, j, scores, visible) for term in self.terms)
        return sum(others, first)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for term in self.terms:
            yield from term.tensors()


@dataclass(frozen=True)
class Scored(Form):
    """Any other bias: a function of a block of scores. It receives complete rows."""

    function: Callable[..., Tensor]  # (i, j, scores, visible) -> bias, as `block`
    numbers: Mapping[str, Tensor]  # the tensors that the function reads

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.numbers.items()

    def block(self, i: Tensor, j: Tensor, scores: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        return self.function(i, j, scores, visible)


def terms(form: Form | None) -> list[Form]:
    """The terms of a form, with nested sums flattened; an empty list for None."""
    if form is None:
        return []
    return [part for term in form.terms for part in terms(term)] if isinstance(form, Sum) else [form]
