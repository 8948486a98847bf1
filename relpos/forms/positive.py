"""Parameters that are positive by construction: the trained value is unbounded, the value in use is its softplus."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Positive(nn.Module):
    """Values above `floor`.

    Called with a dtype, it returns the values in that dtype.

    Args:
        start: Start values, any shape.
        floor: Lower bound.
    """

    def __init__(self, start: Tensor, floor: float = 0.0) -> None:
        super().__init__()
        self.floor = floor
        self.raw = nn.Parameter(torch.empty_like(start))
        self.assign(start)

    @torch.no_grad()
    def assign(self, values: Tensor) -> None:
        """Set the values; those below the floor are set slightly above it."""
        above = (values - self.floor).clamp(min=1e-4)
        self.raw.copy_(above + torch.log(-torch.expm1(-above)))  # inverse of softplus

    def forward(self, dtype: torch.dtype) -> Tensor:
        return self.floor + F.softplus(self.raw.to(dtype))


class Between(nn.Module):
    """Values between `low` and `high`.

    Called with a dtype, it returns the values in that dtype.

    Args:
        start: Start values, any shape.
        low: Lower bound.
        high: Upper bound.
    """

    def __init__(self, start: Tensor, low: float, high: float) -> None:
        super().__init__()
        self.low, self.high = low, high
        self.raw = nn.Parameter(torch.empty_like(start))
        self.assign(start)

    @torch.no_grad()
    def assign(self, values: Tensor) -> None:
        """Set the values; those at the bounds or beyond are set slightly inside."""
        self.raw.copy_(torch.logit((values - self.low) / (self.high - self.low), eps=1e-4))

    def forward(self, dtype: torch.dtype) -> Tensor:
        return self.low + (self.high - self.low) * torch.sigmoid(self.raw.to(dtype))
