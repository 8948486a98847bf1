"""The gate of the input-dependent encodings: one number a token and head, in float32 whatever the model's dtype."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relpos.encodings.tracing import without_autocast


class Gate(nn.Linear):
    """Linear(width, heads), started at N(0, 0.02) with bias 0. Gives (batch, heads, length)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.dim() != 3 or hidden.shape[-1] != self.in_features:
            raise ValueError(f"hidden must be (batch, length, {self.in_features}), not {tuple(hidden.shape)}.")
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        with without_autocast(hidden.device):
            return F.linear(hidden.to(dtype), self.weight.to(dtype), self.bias.to(dtype)).transpose(1, 2)
