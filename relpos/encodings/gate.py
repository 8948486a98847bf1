"""The gate of the input-dependent encodings: one value per token and head, in float32 whatever the model's dtype."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relpos.encodings.checks import check_shape
from relpos.encodings.tracing import autocasts, without_autocast


class Gate(nn.Linear):
    """Linear(width, heads); weights start at N(0, 0.02), biases at 0.

    Called with hidden (batch, length, width), it returns (batch, heads, length).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        check_shape("hidden", hidden, ("batch", "length", self.in_features))
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        if hidden.dtype == dtype == self.weight.dtype and not autocasts(hidden.device):
            return F.linear(hidden, self.weight, self.bias).transpose(1, 2)  # as below, with less to do while decoding
        with without_autocast(hidden.device):
            return F.linear(hidden.to(dtype), self.weight.to(dtype), self.bias.to(dtype)).transpose(1, 2)
