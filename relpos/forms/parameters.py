"""What encodings learn: parameters with a range, and the gates of the input-dependent encodings."""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relpos.forms.checks import check_shape
from relpos.forms.tracing import autocasts, without_autocast


class RangeParameter(nn.Module, ABC):
    """Values from `low` to `high`, in the dtype that it is called with. What is trained is `raw`."""

    def __init__(self, start: Tensor, low: float = 0.0, high: float = math.inf) -> None:
        super().__init__()
        self.low, self.high = low, high
        self.raw = nn.Parameter(torch.empty_like(start))
        self.assign(start)

    @abstractmethod
    def assign(self, values: Tensor) -> None:
        """Set the values."""

    @abstractmethod
    def forward(self, dtype: torch.dtype) -> Tensor:
        """The values."""


class PositiveParameter(RangeParameter):
    """Values above `low`: the softplus of unbounded trained values."""

    @torch.no_grad()
    def assign(self, values: Tensor) -> None:
        """Set the values; those below the range are set slightly above its end."""
        above = (values - self.low).clamp(min=1e-4)
        self.raw.copy_(above + torch.log(-torch.expm1(-above)))  # inverse of softplus

    def forward(self, dtype: torch.dtype) -> Tensor:
        return self.low + F.softplus(self.raw.to(dtype))


class BoundedParameter(RangeParameter):
    """Values between `low` and `high`: the sigmoid of unbounded trained values."""

    @torch.no_grad()
    def assign(self, values: Tensor) -> None:
        """Set the values; those at the bounds or beyond are set slightly inside."""
        self.raw.copy_(torch.logit((values - self.low) / (self.high - self.low), eps=1e-4))

    def forward(self, dtype: torch.dtype) -> Tensor:
        return self.low + (self.high - self.low) * torch.sigmoid(self.raw.to(dtype))


class ClampedParameter(RangeParameter):
    """Values that are trained as they are: each call first clamps the trained values themselves.

    The gradient does not see the clamp, so a value at the end of the range can leave it again. `raw` is (heads, 1, 1)
    for values (heads,), as in the code of Kerple's authors: an optimizer that decays matrices decays it too.
    """

    def __init__(self, start: Tensor, low: float, high: float = math.inf) -> None:
        super().__init__(start[:, None, None], low, high)

    @torch.no_grad()
    def assign(self, values: Tensor) -> None:
        self.raw.copy_(values.view_as(self.raw))

    def forward(self, dtype: torch.dtype) -> Tensor:
        # By `data`: layers that share the parameter call this several times before one backward pass, which would
        # refuse a parameter that was changed in place, although all calls after the first change nothing.
        self.raw.data.clamp_(self.low, self.high)
        return self.raw.to(dtype).flatten()


class AbsoluteParameter(RangeParameter):
    """The absolute value of trained values."""

    @torch.no_grad()
    def assign(self, values: Tensor) -> None:
        self.raw.copy_(values)

    def forward(self, dtype: torch.dtype) -> Tensor:
        return self.raw.to(dtype).abs()


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
