"""What encodings learn: parameters that are bounded by construction, and the gates of the input-dependent encodings."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relpos.forms.checks import check_shape
from relpos.forms.tracing import autocasts, without_autocast


class PositiveParameter(nn.Module):
    """Values above `floor`, in the dtype that it is called with: the softplus of unbounded trained values."""

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


class BoundedParameter(nn.Module):
    """Values between `low` and `high`, in the dtype that it is called with."""

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


class Gate(nn.Linear):
    """Linear(width, heads), (batch, length, width) to (batch, heads, length), in float32 whatever the model's dtype.

    Weights start at N(0, 0.02), biases at 0.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        check_shape("hidden", hidden, ("batch", "length", self.in_features))
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        if hidden.dtype == dtype and not autocasts(hidden.device):
            return self._values(hidden)  # as below, with less to do while decoding
        with without_autocast(hidden.device):
            return self._values(hidden.to(dtype))

    def _values(self, hidden: Tensor) -> Tensor:
        weight, bias = self.weight.to(hidden.dtype), self.bias.to(hidden.dtype)
        if hidden.shape[:2] == (1, 1):  # a matrix times a vector takes half the time of a product of matrices
            return torch.addmv(bias, weight, hidden.reshape(-1))[None, :, None]
        return F.linear(hidden, weight, bias).transpose(1, 2)
