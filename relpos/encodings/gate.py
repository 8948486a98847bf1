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
        return together(hidden, self)[0]


def together(hidden: Tensor, *gates: Gate) -> tuple[Tensor, ...]:
    """The values of several gates of the same input, by one matrix product.

    Args:
        hidden: (batch, length, width).
        gates: Gates of equal sizes.

    Returns:
        (batch, heads, length) for each gate.
    """
    check_shape("hidden", hidden, ("batch", "length", gates[0].in_features))
    weight, bias = _joined([gate.weight for gate in gates]), _joined([gate.bias for gate in gates])
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if hidden.dtype == dtype == weight.dtype and not autocasts(hidden.device):
        values = _product(hidden, weight, bias)  # as below, with less to do while decoding
    else:
        with without_autocast(hidden.device):
            values = _product(hidden.to(dtype), weight.to(dtype), bias.to(dtype))
    return values.transpose(1, 2).chunk(len(gates), dim=1)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _product(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if hidden.shape[:2] == (1, 1):  # a decoding step: a matrix times a vector takes half the time
        return torch.addmv(bias, weight, hidden.reshape(-1))[None, None]
    return F.linear(hidden, weight, bias)
