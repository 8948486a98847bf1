"""The softmax over equal content of a bias that is a function of the distance: what a head could see."""

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.maps.by_distance import ByDistance
from relpos.maps.sources import Source, Sums

COARSE = 4  # queries per cell from which rows of cells are reduced by windows instead of entry by entry


class FlatRows(Source):
    """Weights e^b(i − j) / Σ_j e^b(i − j), for a bias b by distance.

    Args:
        bias: The bias.
    """

    def __init__(self, bias: ByDistance) -> None:
        self.length, self.bias = bias.length, bias
        logits = bias.values.nan_to_num(nan=-torch.inf)
        before = logits[bias.zero :].logcumsumexp(dim=0)  # over the distances 0…i
        self.cheap = bias.zero == 0
        if bias.zero:  # and over the keys after the query, of which the first query sees most
            after = logits[: bias.zero].flip(0).logcumsumexp(dim=0).flip(0)  # (length − 1,)
            before = torch.logaddexp(before, F.pad(after, (0, 1), value=-torch.inf))
        self.lse = before  # (length,)

    def block(self, first: int, end: int, left: int, right: int) -> Tensor:
        values = self.bias.at(torch.arange(first, end)[:, None] - torch.arange(left, right))
        return (values - self.lse[first:end, None]).exp().float()

    def cells(self, row: int, rows: int, column: int, columns: int, size: int) -> Sums:
        if size < COARSE or not self.cheap:
            return super().cells(row, rows, column, columns, size)
        nearest = row - (column + columns - 1)
        number = rows + columns - 1
        # Of the u-th query of a row of cells, the keys of a column that is a cells away have the distances from
        # a·size + u − (size − 1) to a·size + u.
        start = torch.arange(nearest, nearest + number)[:, None] * size + torch.arange(size) - (size - 1)
        low, high = self._windows(start, size)  # (cells apart, size)
        shares = (self.bias.values - self.bias.values.nan_to_num(-torch.inf).amax()).exp().nan_to_num()
        before = F.pad(shares.cumsum(dim=0), (1, 0))
        ends = [(start + offset).clamp(0, len(shares)) for offset in (0, size)]
        total = before[ends[1]] - before[ends[0]]
        seen = F.pad((shares > 0).double().cumsum(dim=0), (1, 0))
        count = seen[ends[1]] - seen[ends[0]]
        lse = F.pad(self.lse, (0, -self.length % size), value=torch.inf)
        scale = (self.bias.values.nan_to_num(-torch.inf).amax() - lse).exp()
        out = [torch.empty(rows, columns, dtype=torch.float64) for _ in range(4)]
        for place in range(rows):
            queries = slice((row + place) * size, (row + place + 1) * size)
            apart = slice(place, place + columns)  # the columns from the last to the first
            own = lse[queries]
            real = own.isfinite()
            least = torch.where(real, low[apart] - own, torch.inf).amin(dim=1).exp()
            most = (high[apart] - own).amax(dim=1).exp()
            number_seen = (count[apart] * real).sum(dim=1)
            sums = (total[apart] @ scale[queries]).clamp(min=0)
            sums = torch.minimum(torch.maximum(sums, least.nan_to_num(posinf=0.0) * number_seen), most * number_seen)
            for kept, new in zip(out, (least, sums, most, number_seen), strict=True):
                kept[place] = new.flip(0)
        out[2] = torch.where(out[3] > 0, out[2], -torch.inf)
        return Sums(*out)

    def _windows(self, start: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The smallest and the largest bias of the `size` distances from each start on."""
        low, high = self.bias.values.nan_to_num(nan=torch.inf), self.bias.values.nan_to_num(nan=-torch.inf)
        low, high = F.pad(low, (size, size), value=torch.inf), F.pad(high, (size, size), value=-torch.inf)
        width = 1
        while width < size:
            low = torch.minimum(low[:-width], low[width:])
            high = torch.maximum(high[:-width], high[width:])
            width *= 2
        place = start.clamp(-size, self.length) + size
        return low[place], high[place]

    def extremes_without_first_key(self) -> tuple[float, float]:
        if not self.cheap:
            return super().extremes_without_first_key()
        values = self.bias.values.nan_to_num(nan=torch.inf)
        nearest = values[:-1].cummin(dim=0).values  # of the keys 1…i, for the queries from 1 on
        largest = self.bias.values.nan_to_num(nan=-torch.inf)[:-1].cummax(dim=0).values
        if self.length == 1:
            return 1.0, 1.0
        return float((nearest - self.lse[1:]).amin().exp()), float((largest - self.lse[1:]).amax().exp())

    @property
    def mean_entropy(self) -> float | None:
        """The mean entropy of a row's weights in nats; None in both directions."""
        if not self.cheap:
            return None
        logits = self.bias.values.nan_to_num(nan=-torch.inf)
        shares = (logits - logits.amax()).exp()
        weighted = torch.where(shares > 0, shares * logits.nan_to_num(neginf=0.0), 0.0).cumsum(dim=0)  # Σ e^b·b
        mean = weighted * (logits.amax() - self.lse).exp()
        return float((self.lse - mean).clamp(min=0).mean())

    @property
    def nbytes(self) -> int:
        return self.lse.nbytes
