"""The forms a bias on the scores can take.

An encoding returns its bias as one of these forms, with tensors in its fields; attention knows how to run each form.
`relpos.attention(q, k, v, form)` takes a form directly, too. `block` is the definition: the bias of the query rows `i`
and the key columns `j`, materialised. Fast paths read the fields instead.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.forms.call import Call
from relpos.forms.checks import Shape, check_shape
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

    @abstractmethod
    def fit(self, call: Call) -> Self:
        """Check a form that was passed to attention against the call; return it as an encoding would have made it."""

    def _fitted(self, call: Call, **shapes: Shape) -> dict[str, Tensor]:
        """Fields of a form that was passed to attention, checked, in the dtype of the call."""
        for name, shape in shapes.items():
            title, x = f"the {name} of {type(self).__name__}", getattr(self, name)
            check_shape(title, x, shape)
            if not x.is_floating_point() or x.device != call.device:
                raise TypeError(
                    f"{title} must hold floating-point numbers on {call.device}, as q does, not {x.dtype} on "
                    f"{x.device}."
                )
        return {name: getattr(self, name).to(call.dtype) for name in shapes}

    def __add__(self, other: "Form") -> "Sum":
        return Sum((self, other)) if isinstance(other, Form) else NotImplemented


@dataclass(frozen=True)
class Positions:
    """Positions of queries and keys whose distances are not the differences of their indices."""

    queries: Tensor  # (1 or batch, queries)
    keys: Tensor  # (1 or batch, keys)
    first: int  # index of the first query


def distances(where: Positions | None, i: Tensor, j: Tensor) -> Tensor:
    """Distances of the queries `i` (rows,) from the keys `j` (keys,): (1 or batch, rows, keys)."""
    if where is None:
        return (i[:, None] - j)[None]
    return where.queries[:, i - where.first, None] - where.keys[:, None, j]


def _check_distances(name: str, columns: int, zero: int, call: Call) -> None:
    """Refuse a table without columns for distances that occur."""
    lowest, highest = call.lowest, call.highest
    if call.window is not None and call.even:
        lowest, highest = max(lowest, -call.window[1]), min(highest, call.window[0])
    if -zero > lowest or columns - 1 - zero < highest:
        raise ValueError(
            f"{name} has {columns} columns, for the distances {-zero} to {columns - 1 - zero}, but the distances "
            f"{lowest} to {highest} occur in this call: give {highest - lowest + 1} columns and zero={-lowest}, the "
            "column of distance 0."
        )


@dataclass(frozen=True)
class Toeplitz(Form):
    """A function of the distance alone: B_ij = table[h, i − j + zero].

    Attributes:
        table: (heads, distances). Passed to attention, it may be (1, distances), and longer than the call needs.
        zero: Column of distance 0: 0 in causal attention, keys − 1 for a table of both directions.
        where: Positions with gaps, or None if the distance is i − j; attention fills it in.
        ends: (low, high) if the entries of all distances up to `low` are one number, and those from `high` on another.
            Then the gradient of their sums is enough: a GPU kernel sums by distance only between them.

    Example:
        >>> table = torch.zeros(12, 512, requires_grad=True)  # column d: a key d tokens before the query
        >>> out = relpos.attention(q, k, v, relpos.Toeplitz(table))
        >>> both = torch.zeros(12, 2 * 512 - 1)  # column d + 511
        >>> out = relpos.attention(q, k, v, relpos.Toeplitz(both, zero=511), causal=False)
    """

    table: Tensor
    zero: int = 0
    where: Positions | None = None
    ends: tuple[int, int] | None = None

    def block(self, i: Tensor, j: Tensor, scores: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        column = distances(self.where, i, j) + self.zero  # (1 or batch, rows, keys)
        # A causal table has no distances of the future; attention masks what is read in their place.
        return self.table[:, column.clamp(0, self.table.shape[1] - 1)].movedim(0, 1)

    def fit(self, call: Call) -> "Toeplitz":
        table = self._fitted(call, table=((1, call.heads), "distances"))["table"]
        _check_distances("the table of Toeplitz", table.shape[1], self.zero, call)
        first = max(0, self.zero + call.lowest)
        end = min(table.shape[1], self.zero + call.highest + 1)
        return Toeplitz(table[:, first:end].expand(call.heads, -1), self.zero - first, ends=self.ends)


@dataclass(frozen=True)
class RankOne(Form):
    """One weight per query times the growth of a running sum since the key: B_ij = −weight_i · (total_i − total_j).

    Attributes:
        total: The running sum, each token's own step included, (batch, heads, keys), in float64: in float32 a long sum
            would lose the differences. Passed to attention, it may be (1, heads, keys) or (batch, 1, keys).
        weight: One per token, (batch, heads, keys), or None for 1.
        dtype: Of the bias; attention fills it in.
        symmetric: |total_i − total_j|, for attention in both directions.
        step: The steps of which total is the running sum, if it is made by `of_steps`.

    Example:
        >>> total = steps.double().cumsum(-1)  # (batch, heads, keys)
        >>> out = relpos.attention(q, k, v, relpos.RankOne(total))
    """

    total: Tensor
    weight: Tensor | None = None
    dtype: torch.dtype = torch.float32
    symmetric: bool = False
    step: Tensor | None = None

    @classmethod
    def of_steps(cls, step: Tensor, weight: Tensor | None, dtype: torch.dtype, symmetric: bool = False) -> "RankOne":
        """The bias whose total is the running sum of steps (batch, heads, keys), which the native kernel computes."""
        return cls(running_sum(step.double()), weight, dtype, symmetric, step)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield ("total", self.total) if self.step is None else ("step", self.step)
        if self.weight is not None:
            yield "weight", self.weight

    def block(self, i: Tensor, j: Tensor, scores: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        gained = self.gained(i, j)
        return -gained if self.weight is None else -self.weight[:, :, i, None] * gained

    def gained(self, i: Tensor, j: Tensor) -> Tensor:
        """total_i − total_j: (batch, heads, rows, keys). It is finite in `dtype` even for huge steps."""
        largest = torch.finfo(self.dtype).max
        gained = (self.total[:, :, i, None] - self.total[:, :, None, j]).clamp(-largest, largest).to(self.dtype)
        return gained.abs() if self.symmetric else gained

    def fit(self, call: Call) -> "RankOne":
        allowed, shape = ((1, call.batch), (1, call.heads), call.keys), (call.batch, call.heads, -1)
        self._fitted(call, total=allowed)
        weight = None if self.weight is None else self._fitted(call, weight=allowed)["weight"].expand(shape)
        return RankOne(self.total.double().expand(shape), weight, call.dtype, self.symmetric)


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
        first: Index of the first query; attention fills it in.
        column: Scale of each key, (1 or batch, keys), for both directions.
        where: Positions with gaps, or None; attention fills it in.

    Example:
        >>> distance, row = torch.arange(512.0), torch.arange(1.0, 513.0)[None]
        >>> network = [nn.Parameter(torch.randn(shape)) for shape in ((32,), (32,), (12, 32), (12,))]
        >>> out = relpos.attention(q, k, v, relpos.Scaled(distance, row, *network))
    """

    table: Tensor
    row: Tensor
    slope: Tensor
    shift: Tensor
    out: Tensor
    offset: Tensor
    first: int = 0
    column: Tensor | None = None
    where: Positions | None = None

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

    def fit(self, call: Call) -> "Scaled":
        if not call.causal and self.column is None:
            raise ValueError(
                "a Scaled bias without column= is defined for keys before the query: give column=, the scale of each "
                f"key (1 or {call.batch}, {call.keys}), or causal=True."
            )
        batch, units = (1, call.batch), self.slope.numel()
        shapes: dict[str, Shape] = {
            "table": ("distances",),
            "row": (batch, call.queries),
            "slope": (units,),
            "shift": (units,),
            "out": (call.heads, units),
            "offset": (call.heads,),
            "column": (batch, call.keys),
        }
        if self.column is None:
            del shapes["column"]
        fitted = self._fitted(call, **shapes)
        farthest = max(call.highest, -call.lowest)
        if len(fitted["table"]) <= farthest:
            raise ValueError(
                f"the table of Scaled has {len(fitted['table'])} entries, from distance 0 on, but the distance "
                f"{farthest} occurs in this call: give at least {farthest + 1}."
            )
        return replace(self, first=call.first, **fitted)  # type: ignore[arg-type]

    def _check_order(self, distance: Tensor, visible: Tensor | None) -> None:
        """Refuse keys of later positions than the query's, for which a bias of one direction is not defined."""
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
    """Products of one vector per token with a table over distances: B_ij = vector_i · table[h, i − j + zero].

    Only the products of the rows that are asked for are computed; for keys, of all keys in each block, so their table
    should be short.

    Attributes:
        vectors: (1 or batch, heads, queries or keys, size).
        table: (1 or heads, distances, size), or (1 or heads, rows, size) with `row`.
        zero: Column of distance 0, as in `Toeplitz`.
        row: The table's row of each distance, integers (distances,), where distances share rows.
        of_keys: Whether the vectors are those of the keys: B_ij = vector_j · table[h, i − j + zero].
        first: Index of the first query; attention fills it in.
        where: Positions with gaps, or None; attention fills it in.

    Example:
        >>> table = torch.zeros(1, 512, 64, requires_grad=True)  # Shaw et al.: one vector per distance
        >>> out = relpos.attention(q, k, v, relpos.Projected(q / 8, table))
    """

    vectors: Tensor
    table: Tensor
    zero: int = 0
    row: Tensor | None = None
    of_keys: bool = False
    first: int = 0
    where: Positions | None = None

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

    def fit(self, call: Call) -> "Projected":
        batch, heads, tokens = (1, call.batch), (1, call.heads), call.keys if self.of_keys else call.queries
        vectors = self._fitted(call, vectors=(batch, heads, tokens, "size"))["vectors"]
        table = self._fitted(call, table=(heads, "rows", vectors.shape[3]))["table"]
        if self.row is not None:
            check_shape("row of Projected", self.row, ("distances",))
        columns = table.shape[1] if self.row is None else len(self.row)
        _check_distances("the table of Projected", columns, self.zero, call)
        return replace(self, vectors=vectors.expand(-1, call.heads, -1, -1), table=table, first=call.first)


@dataclass(frozen=True)
class Sum(Form):
    """A sum of biases: B = Σ_t B^(t). Forms are added by `+`.

    Attributes:
        terms: The biases; those of inner sums take their place.
    """

    terms: tuple[Form, ...]

    def __post_init__(self) -> None:
        if any(isinstance(term, Sum) for term in self.terms):
            object.__setattr__(self, "terms", tuple(part for term in self.terms for part in terms(term)))

    def block(self, i: Tensor, j: Tensor, scores: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        first, *others = (term.block(i, j, scores, visible) for term in self.terms)
        return sum(others, first)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for term in self.terms:
            yield from term.tensors()

    def fit(self, call: Call) -> "Sum":
        return Sum(tuple(term.fit(call) for term in self.terms))


@dataclass(frozen=True)
class Scored(Form):
    """Any other bias: a function of a block of scores. It receives complete rows.

    Attributes:
        function: (i, j, scores, visible) -> bias, with the arguments and the result of `block`.
        numbers: The tensors that the function reads, by name: they are checked, and get gradients.
        by_head: Whether the bias of a head depends on that head alone, and the function runs for any of the heads if
            `Call.q` and `Call.gates` have just these. Then the heads can be divided among processes.

    Example:
        >>> Scored(lambda i, j, scores, visible: -torch.log1p(scores.abs()))
    """

    function: Callable[..., Tensor]
    numbers: Mapping[str, Tensor] = field(default_factory=dict)
    by_head: bool = False

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.numbers.items()

    def block(self, i: Tensor, j: Tensor, scores: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        return self.function(i, j, scores, visible)

    def fit(self, call: Call) -> "Scored":
        if not callable(self.function):
            raise TypeError(
                f"the function of Scored must be callable, (i, j, scores, visible) -> bias, not {self.function!r}."
            )
        return self


def running_sum(x: Tensor) -> Tensor:
    """x.cumsum(-1), with the same bits in every run if PyTorch is asked for that."""
    if not sums_vary(x):
        return x.cumsum(-1)
    return blockwise_running_sum(x.double()).to(x.dtype)  # a product in float64 never becomes TF32


def sums_vary(x: Tensor) -> bool:
    """Whether x.cumsum must be avoided: compiled for CUDA it varies from run to run (pytorch#190946)."""
    return x.is_cuda and torch.are_deterministic_algorithms_enabled()


def blockwise_running_sum(x: Tensor, block: int = 64) -> Tensor:
    """x.cumsum(-1) by products with a triangle, in a fixed order: inside blocks, then over the sums of blocks."""
    length = x.shape[-1]
    parts = F.pad(x, (0, -length % block)).reshape(*x.shape[:-1], -1, block)  # (…, blocks, block)
    inside: Tensor = parts @ torch.ones(block, block, dtype=x.dtype, device=x.device).triu()
    if parts.shape[-2] > 1:
        before = F.pad(blockwise_running_sum(inside[..., -1], block)[..., :-1], (1, 0))  # (…, blocks)
        inside = inside + before[..., None]
    return inside.flatten(-2)[..., :length]


def terms(form: Form | None) -> tuple[Form, ...]:
    """The terms of a form; none for None."""
    return () if form is None else form.terms if isinstance(form, Sum) else (form,)


def locate(form: Form, call: Call) -> Form:
    """The form with the positions by which its terms measure distances, if given positions have gaps.

    Running sums and scores need none.
    """
    if call.even:
        return form
    where = Positions(call.query_positions, call.key_positions, call.first)
    located = [
        replace(term, where=where) if isinstance(term, Toeplitz | Scaled | Projected) else term for term in terms(form)
    ]
    return located[0] if len(located) == 1 else Sum(tuple(located))


def take_heads(form: Form, heads: slice, number: int) -> Form:
    """The form for some of the heads."""

    def cut(x: Tensor, axis: int) -> Tensor:
        return x[(slice(None),) * axis + (heads,)] if x.shape[axis] == number else x

    match form:
        case Sum():
            return Sum(tuple(take_heads(term, heads, number) for term in form.terms))
        case Toeplitz():
            return replace(form, table=cut(form.table, 0))
        case RankOne():
            names = [name for name in ("total", "weight", "step") if getattr(form, name) is not None]
            return replace(form, **{name: cut(getattr(form, name), 1) for name in names})  # type: ignore[arg-type]
        case Scaled():
            return replace(form, out=cut(form.out, 0), offset=cut(form.offset, 0))
        case Projected():
            return replace(form, vectors=cut(form.vectors, 1), table=cut(form.table, 0))
        case Scored(by_head=True):
            return form
    raise ValueError(f"a bias of the form {type(form).__name__} cannot be cut into heads.")
