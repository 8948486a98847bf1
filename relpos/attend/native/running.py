"""A RankOne bias in the kernel's layout that grows with every decoded token."""

import torch
from torch import Tensor

from relpos.attend.native.inputs import Prepared
from relpos.attend.native.library import Totals, constant, load
from relpos.attend.native.rank_one import power_of_two, unit_exponent
from relpos.attend.native.toeplitz import LOG2E


class Running:
    """The running totals of the tokens so far, split into two floats, and their weights.

    The unit is the one that suited the first tokens. If later ones leave its range, `append` says so, and the totals
    must be made again.

    Args:
        step: By how much each token so far raises the total, (batch, heads, tokens).
        weight: Of each token, in the same shape; None means 1.
        capacity: Number of tokens that there is room for.

    Attributes:
        fits: Whether the numbers are in the range of the unit.
    """

    def __init__(self, step: Tensor, weight: Tensor | None, capacity: int) -> None:
        exponent = unit_exponent(step.double().cumsum(-1), weight)  # (batch, heads, 1)
        self.units, self.weigh = power_of_two(-exponent), power_of_two(exponent) * LOG2E
        self.weighted = weight is not None
        # high, low and weight: (3, batch, heads, capacity + pad)
        self.rows = torch.zeros(3, *step.shape[:2], capacity + constant("ROW_PAD"))
        self.capacity, self.length = capacity, 0
        self.sum = torch.zeros(*step.shape[:2], 1, dtype=torch.float64)  # of all steps, in units
        self.fits = self.append(step, weight)

    def append(self, step: Tensor, weight: Tensor | None) -> bool:
        """Add tokens.

        Args:
            step: Their steps, (batch, heads, tokens).
            weight: Their weights, in the same shape; None means 1.

        Returns:
            Whether there was room, and the numbers are in the range of the unit.
        """
        tokens = step.shape[2]
        end = self.length + tokens
        if end > self.capacity:
            return False
        together = step.stride(0) == step.shape[1] * step.stride(1)  # batch and heads are one axis
        if not together or (weight is not None and weight.stride() != step.stride()):
            step, weight = step.contiguous(), None if weight is None else weight.contiguous()
        rows = self.rows
        totals = Totals(
            rows.shape[1] * rows.shape[2],
            self.units.data_ptr(),
            self.weigh.data_ptr(),
            self.sum.data_ptr(),
            rows.data_ptr(),
            rows.stride(0),
            rows.stride(2),
        )
        weights = None if weight is None else weight.data_ptr()
        answer = load().relpos_append(totals, step.data_ptr(), weights, *step.stride()[1:], self.length, tokens)
        self.length = end
        return bool(answer == constant("OK"))

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
