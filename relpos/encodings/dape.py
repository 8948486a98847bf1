"""DAPE: a small network over the heads adjusts any bias to the scores."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relpos.encodings.call import Call
from relpos.encodings.encoding import Encoding, whole
from relpos.encodings.forms import Scored
from relpos.encodings.registry import encoding


class Dape(Encoding):
    """Data-adaptive positional encoding over a base bias.

    The official code's FIRE under it has a LeakyReLU: base="fire", base_options={"leak": 0.01}.
    """

    place = "score"
    form = "Scored"
    learns = "base + 3·units + 1 + units/H; by default base + 97 + 32/H"
    directions = "as its base"
    paper = "Zheng et al. 2024, arXiv 2405.14722"
    formula = "logits = A + B + MLP([A; B]) over the heads;  A the scaled scores, B the base's bias, one hidden layer"
    options = {
        "base": "name of the encoding whose bias is adapted",
        "base_options": "its options; the official code over fire has {'leak': 0.01}",
        "units": "hidden units of the network",
    }

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        base: str = "kerple_log",
        base_options: dict[str, Any] | None = None,
        units: int = 32,
    ) -> None:
        inner = encoding(base, heads, head_dim, **(base_options or {}))
        if inner.place != "score":
            raise ValueError(
                f"{type(self).__name__} adapts a bias on the scores, and {base!r} enters at: {inner.place}."
            )
        super().__init__(heads, head_dim, inner.width)
        self.base, self.gate_size = inner, inner.gate_size
        self.first, self.second = self.layers(2 * heads, whole("units", units), heads)

    def layers(self, inputs: int, units: int, outputs: int) -> tuple[nn.Module, nn.Module]:
        """The network's two layers."""
        return nn.Linear(inputs, units), nn.Linear(units, outputs)

    @property
    def bidirectional(self) -> bool:
        return self.base.bidirectional

    @property
    def needs_scores(self) -> bool:
        return True

    def gates(self, hidden: Tensor) -> Tensor | None:
        return self.base.gates(hidden)

    def adapt(self, stack: Tensor, visible: Tensor) -> Tensor:
        """The network over the stacked scores and biases (batch, 2·heads, rows, keys): (batch, heads, rows, keys)."""
        units = F.leaky_relu(linear(self.first, stack.movedim(1, -1)))
        return linear(self.second, units).movedim(-1, 1)

    def bias(self, call: Call) -> Scored:
        base = self.base.bias(call)
        assert base is not None

        def function(i: Tensor, j: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
            bias = base.block(i, j, scores, visible)
            stack = torch.cat([scores, bias.expand_as(scores)], dim=1)  # (batch, 2·heads, rows, keys)
            return bias + self.adapt(stack, visible)

        return Scored(function, dict(base.tensors()) | dict(self.named_parameters()))


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """A linear layer in the dtype of x."""
    assert isinstance(layer, nn.Linear)
    return F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))
