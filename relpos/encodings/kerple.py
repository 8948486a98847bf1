"""KERPLE: learned kernels of the distance, logarithmic or a power."""

import math

import torch
from torch import Tensor

from relpos.forms.bias import Toeplitz
from relpos.forms.call import Call
from relpos.forms.checks import boolean
from relpos.forms.encoding import Encoding
from relpos.forms.parameters import BoundedParameter, ClampedParameter, PositiveParameter, RangeParameter

FLOOR = 1e-2  # the official code keeps both parameters at or above it


class KerpleLog(Encoding):
    """KERPLE, logarithmic: a learned logarithm of the distance, two values per head.

    Args:
        clamped: Train r1 and r2 as they are and clamp them at 0.01 in each forward pass, as the official code does. By
            default they are above 0.01 by construction.
    """

    paper = "Chi et al. 2022, arXiv 2205.09921"
    formula = "B_ij = −r1·log(1 + r2·|i − j|);  r1, r2 > 0, start at U[0, 2], U[0, 1]"

    def __init__(self, heads: int, head_dim: int, *, clamped: bool = False) -> None:
        super().__init__(heads, head_dim)
        self.r1 = _parameter(2 * torch.rand(heads), clamped)
        self.r2 = _parameter(torch.rand(heads), clamped)

    def bias(self, call: Call) -> Toeplitz:
        r1, r2 = self.r1(call.dtype)[:, None], self.r2(call.dtype)[:, None]  # (heads, 1)
        return Toeplitz(-r1 * torch.log1p(r2 * call.distances.abs()), call.zero)


class KerplePower(Encoding):
    """KERPLE, power: a learned power of the distance, two values per head.

    Args:
        clamped: Train r1 and r2 as they are and clamp them in each forward pass, as the official code does. By default
            they are in the same range by construction.
    """

    paper = "Chi et al. 2022, arXiv 2205.09921"
    formula = "B_ij = −r1·|i − j|^r2;  r1 > 0, 0 < r2 ≤ 2, start at U[0, 1], U[0, 2]"

    def __init__(self, heads: int, head_dim: int, *, clamped: bool = False) -> None:
        super().__init__(heads, head_dim)
        self.r1 = _parameter(torch.rand(heads), clamped)
        self.r2 = _parameter(2 * torch.rand(heads), clamped, high=2.0)

    def bias(self, call: Call) -> Toeplitz:
        r1, r2 = self.r1(call.dtype)[:, None], self.r2(call.dtype)[:, None]  # (heads, 1)
        return Toeplitz(-r1 * call.distances.abs() ** r2, call.zero)


def _parameter(start: Tensor, clamped: bool, high: float = math.inf) -> RangeParameter:
    """One value per head from `FLOOR` to `high`."""
    if boolean("clamped", clamped):
        return ClampedParameter(start, FLOOR, high)
    return PositiveParameter(start, FLOOR) if high == math.inf else BoundedParameter(start, FLOOR, high)
