"""A RankOne bias in the kernel's layout that grows with every decoded token."""

import torch

from relpos.attend.native.inputs import Prepared
from relpos.attend.native.library import constant
from relpos.attend.native.rank_one import power_of_two, unit_exponent
from relpos.attend.native.toeplitz import LOG2E
from relpos.encodings.forms import RankOne

LARGEST = 2.0**100  # of totals and weights as the kernel receives them, far from overflow


class Running:
    """The running totals of the tokens so far, split into two floats, and their weights.

    The unit is the one that suited the first tokens. If later ones leave its range, `append` says so, and the totals
    must be made again.

    Args:
        form: The bias of all tokens so far, whose total is a running sum.
        capacity: Number of tokens that there is room for.
    """

    def __init__(self, form: RankOne, capacity: int) -> None:
        total, weight = form.total, form.weight
        exponent = unit_exponent(total, weight)  # (batch, heads, 1)
        self.units, self.weigh = power_of_two(-exponent), power_of_two(exponent) * LOG2E
        self.weighted = weight is not None
        # high, low and weight: (3, batch, heads, capacity + pad)
        self.rows = torch.zeros(3, *total.shape[:2], capacity + constant("ROW_PAD"))
        self.capacity, self.length = capacity, 0
        self.sum = torch.zeros(*total.shape[:2], 1, dtype=torch.float64)  # of all steps, in units
        self.fits = self.append(form)

    def append(self, form: RankOne) -> bool:
        """Add tokens.

        Args:
            form: Their bias; its total counts from the first of them.

        Returns:
            Whether there was room, and the numbers are in the range of the unit.
        """
        tokens = form.total.shape[2]
        end = self.length + tokens
        if end > self.capacity:
            return False
        scaled = torch.addcmul(self.sum, form.total, self.units)
        high, low, weight = new = self.rows[..., self.length : end]
        high.copy_(scaled)
        low.copy_(scaled - high)
        weight.copy_(self.weigh if form.weight is None else form.weight * self.weigh)
        self.sum, self.length = scaled[..., -1:], end
        return float(torch.linalg.vector_norm(new, torch.inf)) < LARGEST

    def crop(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        if length < self.length:
            self.length = length
            last = self.rows[:2, ..., max(0, length - 1) : max(1, length)].double()
            self.sum = last.sum(0) if length else torch.zeros_like(self.sum)

    def fill(self, prepared: Prepared) -> None:
        """Set the fields of the bias."""
        p, rows = prepared.problem, self.rows
        p.form, p.weighted, p.symmetric = constant("RANK_ONE"), self.weighted, False
        each = rows.stride(0) * rows.element_size()
        p.total_high = rows.data_ptr()
        p.total_low, p.weight, p.total_stride = p.total_high + each, p.total_high + 2 * each, rows.stride(2)
