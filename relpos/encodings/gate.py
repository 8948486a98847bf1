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
        return gate_values(hidden, self)[0]


def gate_values(hidden: Tensor, *gates: Gate) -> list[Tensor]:
    """The values of several gates of the same input, which is checked once: a decoding step has little else to do.

    Args:
        hidden: (batch, length, width).
        gates: Gates of this width.

    Returns:
        (batch, heads, length) for each gate.
    """
    check_shape("hidden", hidden, ("batch", "length", gates[0].in_features))
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if hidden.dtype == dtype and not autocasts(hidden.device):
        return [_values(hidden, gate) for gate in gates]
    with without_autocast(hidden.device):
        return [_values(hidden.to(dtype), gate) for gate in gates]


def _values(hidden: Tensor, gate: Gate) -> Tensor:
    weight, bias = gate.weight.to(hidden.dtype), gate.bias.to(hidden.dtype)
    if hidden.shape[:2] == (1, 1):  # a matrix times a vector takes half the time of a product of matrices
        return torch.addmv(bias, weight, hidden.reshape(-1))[None, :, None]
    return F.linear(hidden, weight, bias).transpose(1, 2)
