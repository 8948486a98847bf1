"""The forms a bias on the scores can take.

An encoding says which form its bias has and gives the numbers; attention knows how to run each form. `block` is the
definition: the bias of the query rows `i` and the key columns `j`, written out. Fast paths read the fields instead.
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
        """The bias of queries `i` (rows,) and keys `j` (keys,): (1 or batch, heads, rows, keys).

        `scores` are the scaled scores of these rows and `visible` which of them count; only `Scored` reads them.
        """

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The numbers the form carries, by name."""
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
        # A causal table has no future distances; what is read there is masked by attention.
        return self.table[:, column.clamp(0, self.table.shape[1] - 1)][None]


@dataclass(frozen=True)
class RankOne(Form):
    """A weight a query times what a running sum has gained since the key: B_ij = −weight_i · (total_i − total_j)."""

    total: Tensor  # (batch, heads, keys), float64: a long sum in float32 would lose the differences
    weight: Tensor | None  # (batch, heads, keys); None means 1
    dtype: torch.dtype  # of the bias
    symmetric: bool = False  # |total_i − total_j|, for attention in both directions

    def block(self, i: Tensor, j: Tensor, scores: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        gained = self.gained(i, j)
        return -gained if self.weight is None else -self.weight[:, :, i, None] * gained

    def gained(self, i: Tensor, j: Tensor) -> Tensor:
        """total_i − total_j: (batch, heads, rows, keys). Finite in `dtype`, however large the steps are."""
        largest = torch.finfo(self.dtype).max
        gained = (self.total[:, :, i, None] - self.total[:, :, None, j]).clamp(-largest, largest).to(self.dtype)
        return gained.abs() if self.symmetric else gained


@dataclass(frozen=True)
class Scaled(Form):
    """A piecewise-linear function a head of a table over distances, scaled by row.

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
    """Anything else: a function of a block of scores, which sees whole rows."""

    function: Callable[..., Tensor]  # (i, j, scores, visible) -> bias, as `block`
    numbers: Mapping[str, Tensor]  # what the function computes with

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.numbers.items()

    def block(self, i: Tensor, j: Tensor, scores: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        return self.function(i, j, scores, visible)


def terms(form: Form | None) -> list[Form]:
    """The terms of a form, sums of sums opened; none for no bias."""
    if form is None:
        return []
    return [part for term in form.terms for part in terms(term)] if isinstance(form, Sum) else [form]
