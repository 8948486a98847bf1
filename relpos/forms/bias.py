"""The forms a bias on the scores can take.

An encoding returns its bias as one of these forms, with tensors in its fields; attention knows how to run each form.
`block` is the definition: the bias of the query rows `i` and the key columns `j`, materialised. Fast paths read the
fields instead.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.forms.tracing import has_values


class Form(ABC):
    """A bias on the scores."""

    @abstractmethod
    def block(self, i: Tensor, j: Tensor, scores: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        """Materialise the bias of some queries and keys.

        Args:
            i: Indices of the queries, (rows,).
            j: Indices of the keys, (keys,).
            scores: Scaled scores of these queries and keys, (batch, heads, rows, keys). Only `Scored` reads them.
            visible: Which keys each query may see, (1 or batch, 1 or heads, rows, keys). Only `Scored` reads it.

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
class Located:
    """Positions of queries and keys whose distances are not the differences of their indices."""

    queries: Tensor  # (1 or batch, queries)
    keys: Tensor  # (1 or batch, keys)
    first: int  # index of the first query

    def distances(self, i: Tensor, j: Tensor) -> Tensor:
        """Distances of the queries `i` (rows,) from the keys `j` (keys,): (1 or batch, rows, keys)."""
        return self.queries[:, i - self.first, None] - self.keys[:, None, j]


def distances(where: Located | None, i: Tensor, j: Tensor) -> Tensor:
    """Distances of queries from keys: (1 or batch, rows, keys)."""
    return (i[:, None] - j)[None] if where is None else where.distances(i, j)


@dataclass(frozen=True)
class Toeplitz(Form):
    """A function of the distance alone: B_ij = table[h, i − j].

    Attributes:
        table: (heads, distances), over `Call.distances`.
        zero: Column of distance 0.
        where: Positions with gaps, or None if the distance is i − j; attention fills it in.

    Example:
        >>> Toeplitz(-slopes[:, None] * call.distances.abs(), call.zero)
    """

    table: Tensor  # (heads, distances), over Call.distances
    zero: int  # column of distance 0
    where: Located | None = None  # None: the distance is i − j

    def block(self, i: Tensor, j: Tensor, scores: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        column = distances(self.where, i, j) + self.zero  # (1 or batch, rows, keys)
        # A causal table has no distances of the future; attention masks what is read in their place.
        return self.table[:, column.clamp(0, self.table.shape[1] - 1)].movedim(0, 1)


@dataclass(frozen=True)
class RankOne(Form):
    """One weight per query times the growth of a running sum since the key: B_ij = −weight_i · (total_i − total_j).

    Attributes:
        total: The running sum, each token's own step included, (batch, heads, keys), in float64.
        weight: (batch, heads, keys), or None for 1.
        dtype: Of the bias.
        symmetric: |total_i − total_j|, for attention in both directions.

    Example:
        >>> RankOne(call.gates[..., 0].double().cumsum(-1), None, call.dtype, symmetric=not call.causal)
    """

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
    With `column`, for attention in both directions: x_ij = table[|i − j|] / (row[i] if i ≥ j else column[j]).

    Attributes:
        table: (distances,), from distance 0 on.
        row: Scale of each query, (1 or batch, queries).
        slope: Of each unit, (units,).
        shift: Of each unit, (units,).
        out: (heads, units).
        offset: (heads,).
        first: Index of the first query.
        column: Scale of each key, (1 or batch, keys), for both directions.
        where: Positions with gaps, or None; attention fills it in.
    """

    table: Tensor  # (distances,), from distance 0 on
    row: Tensor  # (1 or batch, queries)
    slope: Tensor  # (units,)
    shift: Tensor  # (units,)
    out: Tensor  # (heads, units)
    offset: Tensor  # (heads,)
    first: int = 0  # index of the first query
    column: Tensor | None = None  # (1 or batch, keys)
    where: Located | None = None  # None: the distance is i − j

    def block(self, i: Tensor, j: Tensor, scores: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        distance = distances(self.where, i, j)  # (1 or batch, rows, keys)
        scale = self.row[:, i - self.first, None]  # (1 or batch, rows, 1)
        if self.column is None:
            self._check_order(distance, visible)
            distance = distance.clamp(min=0)
        else:
            scale = torch.where(distance < 0, self.column[:, None, j], scale)
            distance = distance.abs()
        x = self.table[distance] / scale  # (1 or batch, rows, keys)
        units = F.relu(x[..., None] * self.slope + self.shift)  # (1 or batch, rows, keys, units)
        return (units @ self.out.T + self.offset).movedim(-1, 1)

    def _check_order(self, distance: Tensor, visible: Tensor | None) -> None:
        """Refuse keys of later positions than the query's, for which a bias of one direction is not defined.

        Raises:
            ValueError: A query sees one.
        """
        if self.where is None or visible is None or distance.device.type != "cpu" or not has_values(distance):
            return  # in causal attention the indices ascend; reading values would stall an accelerator
        if bool(((distance < 0)[:, None] & visible).any()):
            raise ValueError(
                "the positions descend, so that a query sees a key of a later position, and the bias is defined for "
                "earlier ones only: give positions that ascend, or an encoding of both directions (fire with "
                "symmetric=True)."
            )


@dataclass(frozen=True)
class Projected(Form):
    """Products of one vector per token with a table of vectors over distances: B_ij = vector_i · table[h, i − j].

    With `of_keys`, the vectors are those of the keys: B_ij = vector_j · table[h, i − j]. Only the products of the rows
    that are asked for are computed; for keys, of all keys in each block, so their table should be short.
    """

    vectors: Tensor  # (1 or batch, heads, queries or keys, size)
    table: Tensor  # (1 or heads, table rows, size)
    zero: int  # column of distance 0 in Call.distances
    row: Tensor | None = None  # (distances,), the table's row of each distance; None: the table is over Call.distances
    of_keys: bool = False
    first: int = 0  # index of the first query
    where: Located | None = None  # None: the distance is i − j

    def block(self, i: Tensor, j: Tensor, scores: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        number = self.table.shape[-2] if self.row is None else len(self.row)
        # A causal table has no distances of the future; attention masks what is read in their place.
        column = (distances(self.where, i, j) + self.zero).clamp(0, number - 1)  # (1 or batch, rows, keys)
        index = column if self.row is None else self.row[column]
        if self.of_keys:
            return self._products(j, index.mT).mT
        return self._products(i - self.first, index)

    def _products(self, tokens: Tensor, index: Tensor) -> Tensor:
        """Products of some tokens with the rows of the table at `index` (1 or batch, tokens, entries)."""
        products = self.vectors[:, :, tokens] @ self.table.mT  # (1 or batch, heads, tokens, table rows)
        shape = (max(len(index), len(products)), products.shape[1], *index.shape[1:])
        return products.expand(shape[0], -1, -1, -1).gather(-1, index[:, None].expand(shape))


@dataclass(frozen=True)
class Sum(Form):
    """A sum of biases: B = Σ_t B^(t).

    Attributes:
        terms: The biases.
    """

    terms: tuple[Form, ...]

    def block(self, i: Tensor, j: Tensor, scores: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        first, *others = (term.block(i, j, scores, visible) for term in self.terms)
        return sum(others, first)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for term in self.terms:
            yield from term.tensors()


@dataclass(frozen=True)
class Scored(Form):
    """Any other bias: a function of a block of scores. It receives complete rows.

    Attributes:
        function: (i, j, scores, visible) -> bias, with the arguments and the result of `block`.
        numbers: The tensors that the function reads, by name: they are checked, and get gradients.
        by_head: Whether the bias of a head depends on that head alone, and the function runs for any of the heads if
            `Call.q` and `Call.gates` have just these. Then the heads can be divided among processes.

    Example:
        >>> Scored(lambda i, j, scores, visible: -torch.log1p(scores.abs()), {})
    """

    function: Callable[..., Tensor]  # (i, j, scores, visible) -> bias, as `block`
    numbers: Mapping[str, Tensor]  # the tensors that the function reads
    by_head: bool = False  # whether it runs for any subset of the heads

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.numbers.items()

    def block(self, i: Tensor, j: Tensor, scores: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        return self.function(i, j, scores, visible)


def terms(form: Form | None) -> list[Form]:
    """The terms of a form, with nested sums flattened; an empty list for None."""
    if form is None:
        return []
    return [part for term in form.terms for part in terms(term)] if isinstance(form, Sum) else [form]


def locate(form: Form, where: Located) -> Form:
    """The form with the positions by which its terms measure distances. Running sums and scores need none."""
    if isinstance(form, Sum):
        return Sum(tuple(locate(term, where) for term in form.terms))
    return replace(form, where=where) if isinstance(form, Toeplitz | Scaled | Projected) else form


def take_heads(form: Form, heads: slice, number: int) -> Form:
    """The form for some of the heads.

    Args:
        form: For all heads. Tensors that have just these heads already, made from gates of these, stay as they are.
        heads: Which heads.
        number: Number of all heads.

    Raises:
        ValueError: The form is a function that needs all heads.
    """

    def cut(x: Tensor, axis: int) -> Tensor:
        return x[(slice(None),) * axis + (heads,)] if x.shape[axis] == number else x

    match form:
        case Sum():
            return Sum(tuple(take_heads(term, heads, number) for term in form.terms))
        case Toeplitz():
            return replace(form, table=cut(form.table, 0))
        case RankOne():
            return replace(form, total=cut(form.total, 1), weight=None if form.weight is None else cut(form.weight, 1))
        case Scaled():
            return replace(form, out=cut(form.out, 0), offset=cut(form.offset, 0))
        case Projected():
            return replace(form, vectors=cut(form.vectors, 1), table=cut(form.table, 0))
        case Scored(by_head=True):
            return form
    raise ValueError(f"a bias of the form {type(form).__name__} cannot be cut into heads.")
