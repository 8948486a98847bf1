"""Values of one head of a layer that are computed entry by entry: from the bias's form, and from queries and keys."""

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.attend.backends import choose
from relpos.forms.bias import Form, Projected, RankOne, Scaled, Sum, Toeplitz
from relpos.maps.computing import check_time
from relpos.maps.layer import Layer, Quantity, form_of_head
from relpos.maps.values import ENTRIES, Cells, HeadValues, reduce_block


class Entries(HeadValues):
    """The bias, scores or weights of one head.

    Args:
        layer: The layer; it has a bias if that is shown.
        head: The head; 0 is the first.
        show: bias, scores or weights.
    """

    def __init__(self, layer: Layer, head: int, show: Quantity) -> None:
        self.length, self.causal, self.show = layer.length, layer.causal, show
        keys = layer.k.shape[1]
        group = head * keys // layer.heads
        mask = layer.call.mask
        if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] > 1:
            mask = mask[:, head : head + 1]
        sinks = layer.call.sinks
        sinks = None if sinks is None else sinks[head : head + 1]
        self.call = replace(layer.call, mask=mask, sinks=sinks, rotation=None)  # q and k are rotated already
        self.q, self.k = layer.q[:, head : head + 1], layer.k[:, group : group + 1]
        self.form = form_of_head(layer, head)

    @torch.no_grad()
    def block(self, first: int, end: int, left: int, right: int) -> Tensor:
        values = self._logits(first, end, left, right)
        if self.show == "weights":
            values = values.sub_(self.lse[first:end, None]).exp_()
        return values if self._all_seen(first, right) else self._masked(values, first, end, left, right)

    def _all_seen(self, first: int, right: int) -> bool:
        """Whether all keys before `right` are seen by the queries from `first` on, as far as the call can say."""
        call = self.call
        plain = call.window is None and call.documents is None and call.padding is None and call.mask is None
        return plain and (not call.causal or right - 1 <= first)

    def _masked(self, values: Tensor, first: int, end: int, left: int, right: int) -> Tensor:
        visible = self.call.visible(torch.arange(first, end), torch.arange(left, right))[0, 0]
        return values.masked_fill(~visible, torch.nan)

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

    @property
    @torch.no_grad()
    def entropy(self) -> Tensor:
        """The entropy of each row's weights, −Σ w log w in nats, in memory linear in the length: (length,)."""
        entropy = torch.empty(self.length)
        rows = max(1, ENTRIES // self.length)
        for first in range(0, self.length, rows):
            check_time()
            end = min(first + rows, self.length)
            right = end if self.call.causal else self.length
            logits, lse = self._logits(first, end, 0, right), self.lse[first:end]
            if not self._all_seen(first, right):
                logits = self._masked(logits, first, end, 0, right).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
            shares = (logits - lse[:, None]).exp()
            mean = torch.where(shares > 0, shares * logits, 0.0).sum(dim=1)
            entropy[first:end] = torch.where(lse.isfinite(), shares.sum(dim=1) * lse - mean, 0.0)
        return entropy

    def cells(self, row: int, rows: int, column: int, columns: int, size: int) -> Cells:
        if not self.call.causal or not self._all_seen(self.length, 0):
            return super().cells(row, rows, column, columns, size)
        cells = Cells.empty(rows, columns)
        step = max(1, ENTRIES // (columns * size * size))
        for first in range(0, rows, step):
            check_time()
            last = min(first + step, rows)
            # Columns before these rows of cells are seen by all of their queries, those after them by none.
            before, after = (min(max(row + place - column, 0), columns) for place in (first, last))
            for start, stop in ((0, before), (before, after)):
                if start == stop:
                    continue
                queries = ((row + first) * size, min((row + last) * size, self.length))
                keys = ((column + start) * size, min((column + stop) * size, self.length))
                cells.put(first, start, reduce_block(self.block(*queries, *keys), last - first, stop - start, size))
        return cells

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
    """Values whose form reads complete rows of all heads' scores (CoPE, DAPE).

    Args:
        layer: The layer.
        head: The head; 0 is the first.
        show: bias, scores or weights.
    """

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
    if isinstance(form, Toeplitz) and form.where is None:
        return _by_distance(form.table[0], form.zero, first, end, left, right)
    return form.block(torch.arange(first, end), torch.arange(left, right))[0, 0]


def _by_distance(table: Tensor, zero: int, first: int, end: int, left: int, right: int) -> Tensor:
    """table[zero + i − j] without a table of indices; 0 at distances that it does not have, which are not seen."""
    rows, columns = end - first, right - left
    low, high = zero + first - (right - 1), zero + end - left  # places of the smallest distance, and past the largest
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
