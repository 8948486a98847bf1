"""The gate of the input-dependent encodings: one value per token and head, in float32 whatever the model's dtype."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relpos.forms.checks import check_shape
from relpos.forms.tracing import autocasts, without_autocast


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
        if hidden.dtype == dtype and not autocasts(hidden.device):
            return self._values(hidden)  # as below, with less to do while decoding
        with without_autocast(hidden.device):
            return self._values(hidden.to(dtype))

    def _values(self, hidden: Tensor) -> Tensor:
        weight, bias = self.weight.to(hidden.dtype), self.bias.to(hidden.dtype)
        if hidden.shape[:2] == (1, 1):  # a matrix times a vector takes half the time of a product of matrices
            return torch.addmv(bias, weight, hidden.reshape(-1))[None, :, None]
        return F.linear(hidden, weight, bias).transpose(1, 2)
