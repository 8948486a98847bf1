"""The values of a head of a layer, in the form that is cheapest: closed where its bias allows it, else by entries."""

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.attend.backends import choose
from relpos.forms.bias import Form, Projected, RankOne, Scaled, Sum, Toeplitz
from relpos.maps.layer import Layer, Quantity
from relpos.maps.rank_one import RankOneValues
from relpos.maps.scaled import ScaledValues, has_pieces
from relpos.maps.toeplitz import ByDistance, FlatContent
from relpos.maps.values import ENTRIES, Difference, HeadValues


@torch.no_grad()
def head_values(layer: Layer, head: int, show: Quantity) -> HeadValues:
    """The bias, scores or weights of a head (0 is the first) of a layer."""
    if layer.reads_rows:
        return CompleteRows(layer, head, show)
    if show == "bias" and layer.even_by_distance:
        return _by_distance(layer, head)
    if show == "bias" and layer.causal and layer.plain and layer.call.window is None:
        form = layer.form_of_head(head)
        if isinstance(form, RankOne) and not form.symmetric:
            return RankOneValues(form, layer.length)
        if isinstance(form, Scaled) and has_pieces(form):
            return ScaledValues(form, layer.length)
    return Entries(layer, head, show)


def all_heads(layer: Layer, show: Quantity) -> list[HeadValues]:
    """The values of all heads of a layer."""
    values = [head_values(layer, head, show) for head in range(layer.heads)]
    for other in values[1:]:
        if isinstance(other, CompleteRows) and isinstance(values[0], CompleteRows):
            other.rows = values[0].rows  # computed once for all heads
    return values


@torch.no_grad()
def flat_values(layer: Layer, head: int) -> HeadValues:
    """The softmax of the bias of a head (0 is the first) over equal content."""
    if layer.even_by_distance:
        return FlatContent(_by_distance(layer, head))
    return head_values(layer.without_content(), head, "weights")


def _by_distance(layer: Layer, head: int) -> ByDistance:
    alone = replace(layer, heads=1, form=layer.form_of_head(head), q=layer.q[:, :1], k=layer.k[:, :1])
    values = ByDistance(alone.values_by_distance("bias")[0], layer.length)
    values.causal = layer.causal  # a single token has one distance in either case
    return values


def difference(a: HeadValues, b: HeadValues) -> HeadValues:
    """a − b."""
    if a.length != b.length:
        raise ValueError(
            f"a difference needs maps of one length, and these have {a.length:,} and {b.length:,} tokens: give both "
            "the same length."
        )
    if isinstance(a, ByDistance) and isinstance(b, ByDistance) and a.zero == b.zero:
        return ByDistance(a.values - b.values, a.length)
    return Difference(a, b)


class Entries(HeadValues):
    """The bias, scores or weights of one head (0 is the first), entry by entry."""

    def __init__(self, layer: Layer, head: int, show: Quantity) -> None:
        self.length, self.causal, self.show = layer.length, layer.causal, show
        group = head * layer.k.shape[1] // layer.heads
        mask = layer.call.mask
        if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] > 1:
            mask = mask[:, head : head + 1]
        sinks = layer.call.sinks
        sinks = None if sinks is None else sinks[head : head + 1]
        self.call = replace(layer.call, mask=mask, sinks=sinks, rotation=None)  # q and k are rotated already
        self.q, self.k = layer.q[:, head : head + 1], layer.k[:, group : group + 1]
        self.form = layer.form_of_head(head)

    @torch.no_grad()
    def block(self, first: int, end: int, left: int, right: int) -> Tensor:
        values = self._logits(first, end, left, right)
        if self.show == "weights":
            values = values.sub_(self.lse[first:end, None]).exp_()
        if self._all_seen(first, right):
            return values
        visible = self.call.visible(torch.arange(first, end), torch.arange(left, right))[0, 0]
        return values.masked_fill(~visible, torch.nan)

    def _all_seen(self, first: int, right: int) -> bool:
        """Whether all keys before `right` are seen by the queries from `first` on, as far as the call can say."""
        call = self.call
        plain = call.window is None and call.documents is None and call.padding is None and call.mask is None
        return plain and (not call.causal or right - 1 <= first)

    def _logits(self, first: int, end: int, left: int, right: int) -> Tensor:
        """The bias, or the scores with the bias, whether seen or not: (queries, keys)."""
        call = self.call
        if self.show == "bias":
            assert self.form is not None
            return bias_block(self.form, first, end, left, right)
        q, k = self.q[0, 0, first:end].to(call.dtype) * call.scale, self.k[0, 0, left:right].to(call.dtype)
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(q @ k.T / call.softcap)
            return scores if self.form is None else scores.add_(bias_block(self.form, first, end, left, right))
        return q @ k.T if self.form is None else bias_block(self.form, first, end, left, right).addmm_(q, k.T)

    @cached_property
    @torch.no_grad()
    def lse(self) -> Tensor:
        """The log-sum-exp of each row with the sink, (length,); inf for a row that sees nothing: its weights are 0."""
        q, k = (x.to(self.call.dtype).contiguous() for x in (self.q, self.k))
        v = k.new_zeros(1, 1, self.length, 1)
        call = replace(self.call, return_lse=True, dropout=0.0)
        _, lse = choose(None, q, v, self.form, call).attention(q, k, v, self.form, call)
        assert lse is not None
        return lse[0, 0].masked_fill(lse[0, 0] == -torch.inf, torch.inf)

    @torch.no_grad()
    def diagonal(self, distance: int) -> Tensor | None:
        call = self.call
        if call.documents is not None or call.padding is not None or call.mask is not None:
            return None
        i = torch.arange(max(distance, 0), self.length + min(distance, 0))
        left, right = call.window or (self.length, self.length)
        if not -right <= distance <= left or (distance < 0 and self.causal):
            return torch.full((len(i),), torch.nan)
        bias = None if self.form is None else bias_at(self.form, i, distance)
        if self.form is not None and bias is None:
            return None
        if self.show == "bias":
            return bias
        q, k = self.q[0, 0, i].to(call.dtype), self.k[0, 0, i - distance].to(call.dtype)
        scores = (q * k).sum(dim=-1) * call.scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        scores = scores if bias is None else scores + bias
        return scores if self.show == "scores" else (scores - self.lse[i]).exp()

    @property
    def nbytes(self) -> int:
        return 8 * self.length


class CompleteRows(HeadValues):
    """Values of a head (0 is the first) whose form reads complete rows of all heads' scores (CoPE, DAPE)."""

    def __init__(self, layer: Layer, head: int, show: Quantity) -> None:
        self.length, self.causal, self.layer, self.head, self.show = layer.length, layer.causal, layer, head, show
        self.together = layer.heads
        self.rows: dict[tuple[int, int], Tensor] = {}  # of all heads, computed last; all heads may share it

    def block(self, first: int, end: int, left: int, right: int) -> Tensor:
        out = torch.full((end - first, right - left), torch.nan)
        step = max(1, ENTRIES // (self.layer.heads * self.length))
        for start in range(first, end, step):
            stop = min(start + step, end)
            rows = self.rows.get((start, stop))
            if rows is None:
                self.rows.clear()
                rows = self.rows[start, stop] = self.layer.rows(self.show, start, stop - 1)
            wide = max(0, min(right, rows.shape[-1]) - left)  # a causal row ends at its last query
            out[start - first : stop - first, :wide] = rows[self.head, :, left : left + wide]
        return out


def bias_block(form: Form, first: int, end: int, left: int, right: int) -> Tensor:
    """The bias of one head (a form with a single head) for the queries first…end − 1 and the keys left…right − 1."""
    if isinstance(form, Sum):
        parts = [bias_block(term, first, end, left, right) for term in form.terms]
        return torch.stack(parts).sum(dim=0)
    if not isinstance(form, Toeplitz) or form.where is not None:
        return form.block(torch.arange(first, end), torch.arange(left, right))[0, 0]
    # table[zero + i − j] without a table of indices; 0 at distances that it does not have, which are not seen.
    table, rows, columns = form.table[0], end - first, right - left
    low, high = form.zero + first - (right - 1), form.zero + end - left  # of the smallest distance; past the largest
    piece = table[min(max(low, 0), len(table)) : max(min(high, len(table)), 0)]
    piece = F.pad(piece, (min(max(-low, 0), high - low), 0))
    piece = F.pad(piece, (0, high - low - len(piece))).flip(0)
    # Entry (i, j) is piece[rows − 1 − i + j]: with the rows in reverse, each begins one place after the one before.
    return piece.as_strided((rows, columns), (1, 1)).flip(0)


def bias_at(form: Form, i: Tensor, distance: int) -> Tensor | None:
    """The bias of one head for the queries i and the keys i − distance; None where only blocks can be computed."""
    match form:
        case Sum():
            parts = [bias_at(term, i, distance) for term in form.terms]
            return None if any(part is None for part in parts) else torch.stack(parts).sum(dim=0)  # type: ignore[arg-type]
        case Toeplitz(where=None):
            return form.table[0, form.zero + distance].expand(len(i))
        case RankOne():
            gained = (form.total[0, 0, i] - form.total[0, 0, i - distance]).to(form.dtype)
            gained = gained.abs() if form.symmetric else gained
            return -gained if form.weight is None else -form.weight[0, 0, i] * gained
        case Scaled(where=None):
            scale = form.row[0, i - form.first]
            if distance < 0:
                assert form.column is not None
                scale = form.column[0, i - distance]
            x = form.table[abs(distance)] / scale
            return torch.relu(x[:, None] * form.slope + form.shift) @ form.out[0] + form.offset[0]
        case Projected(where=None):
            row = form.zero + distance if form.row is None else int(form.row[form.zero + distance])
            vectors = form.vectors[0, 0, i - distance if form.of_keys else i - form.first]
            return vectors @ form.table[0, row]
    return None
