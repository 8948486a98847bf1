"""Values of one head of a layer that are computed entry by entry: from the bias's form, and from queries and keys."""

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from relpos.encodings.call import products
from relpos.encodings.forms import Form, RankOne, Scaled, Sum, Toeplitz, terms
from relpos.view.explorer.deadline import check_time
from relpos.view.explorer.sources import ENTRIES, Source
from relpos.view.layers import Layer, Values


class Entries(Source):
    """The bias, scores or weights of one head.

    Args:
        layer: The layer; it has a bias if that is shown.
        head: The head; 0 is the first.
        show: bias, scores or weights.
    """

    def __init__(self, layer: Layer, head: int, show: Values) -> None:
        self.length, self.show = layer.length, show
        keys = layer.k.shape[1]
        group = head * keys // layer.heads
        mask = layer.call.mask
        if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] > 1:
            mask = mask[:, head : head + 1]
        sinks = layer.call.sinks
        self.call = replace(layer.call, mask=mask, sinks=None if sinks is None else sinks[head : head + 1])
        self.q, self.k = layer.q[:, head : head + 1], layer.k[:, group : group + 1]
        self.form = form_of_head(layer.form, head)

    @torch.no_grad()
    def block(self, first: int, end: int, left: int, right: int) -> Tensor:
        values = self._logits(first, end, left, right)
        if self.show == "weights":
            values = (values - self.lse[first:end, None]).exp()
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
        i, j = torch.arange(first, end), torch.arange(left, right)
        if self.show == "bias":
            assert self.form is not None
            return self.form.block(i, j)[0, 0]
        q, k = self.q[:, :, first:end].to(call.dtype), self.k[:, :, left:right].to(call.dtype)
        scores = products(q * call.scale, k)
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        return (scores if self.form is None else scores + self.form.block(i, j))[0, 0]

    @cached_property
    def lse(self) -> Tensor:
        """The logarithm of the sum of e^score over each row, in memory linear in the length: (length,)."""
        return self._row_statistics[0]

    @property
    def entropy(self) -> Tensor:
        """The entropy of each row's weights, in nats: (length,)."""
        return self._row_statistics[1]

    @cached_property
    @torch.no_grad()
    def _row_statistics(self) -> tuple[Tensor, Tensor]:
        lse, entropy = torch.empty(2, self.length, dtype=torch.float32)
        rows = max(1, ENTRIES // self.length)
        for first in range(0, self.length, rows):
            check_time()
            end = min(first + rows, self.length)
            right = end if self.call.causal else self.length
            logits = self._logits(first, end, 0, right)
            if not self._all_seen(first, right):
                logits = self._masked(logits, first, end, 0, right).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
            alone = (logits == -torch.inf).all(dim=1)
            sums = logits.logsumexp(dim=1)
            sink = self.call.sinks
            if sink is not None:
                sums = torch.logaddexp(sums, sink.to(sums.dtype))
            shares = (logits - sums[:, None]).exp()
            mean = torch.where(shares > 0, shares * logits, 0.0).sum(dim=1)
            lse[first:end] = sums.masked_fill(alone, torch.inf)  # weights of 0
            entropy[first:end] = (shares.sum(dim=1) * sums - mean).masked_fill(alone, 0.0)
        return lse, entropy

    @property
    def nbytes(self) -> int:
        return 8 * self.length


class CompleteRows(Source):
    """Values whose form reads complete rows of all heads' scores (CoPE, DAPE).

    Args:
        layer: The layer.
        head: The head; 0 is the first.
        show: bias, scores or weights.
    """

    def __init__(self, layer: Layer, head: int, show: Values) -> None:
        self.length, self.layer, self.head, self.show = layer.length, layer, head, show

    def block(self, first: int, end: int, left: int, right: int) -> Tensor:
        out = torch.full((end - first, right - left), torch.nan)
        step = max(1, ENTRIES // (self.layer.heads * self.length))
        for start in range(first, end, step):
            stop = min(start + step, end)
            rows = self.layer.rows(self.show, start, stop - 1)[self.head]  # (rows, keys up to the last query)
            wide = max(0, min(right, rows.shape[1]) - left)
            out[start - first : stop - first, :wide] = rows[:, left : left + wide]
        return out


def form_of_head(form: Form | None, head: int) -> Form | None:
    """The bias of one head, as a form with a single head."""
    here = slice(head, head + 1)
    match form:
        case None:
            return None
        case Toeplitz():
            return replace(form, table=form.table[here])
        case RankOne():
            return replace(
                form, total=form.total[:, here], weight=None if form.weight is None else form.weight[:, here]
            )
        case Scaled():
            return replace(form, out=form.out[here], offset=form.offset[here])
        case Sum():
            parts = [form_of_head(term, head) for term in form.terms]
            return Sum(tuple(part for part in parts if part is not None))
    raise TypeError(f"the bias of one head cannot be taken from {type(form).__name__}.")


def reads_rows(layer: Layer) -> bool:
    """Whether the bias of a layer needs complete rows of all heads."""
    return any(not isinstance(part, Toeplitz | RankOne | Scaled) for part in terms(layer.form))
