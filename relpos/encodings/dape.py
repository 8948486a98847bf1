from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relpos.encodings.registry import encoding, encoding_class
from relpos.forms.bias import Scored
from relpos.forms.call import Call
from relpos.forms.cards import options_of
from relpos.forms.checks import integer_at_least
from relpos.forms.encoding import Encoding

Layer = nn.Linear | nn.Conv2d


class Dape(Encoding):
    """DAPE: any bias, adapted to the scores by a small network over the heads.

    Args:
        base: Name of the encoding whose bias is adapted.
        base_options: Options of the base. FIRE in the official code has a LeakyReLU: base="fire",
            base_options={"leak": 0.01}.
        units: Hidden units of the network.
    """

    paper = "Zheng et al. 2024, arXiv 2405.14722"
    formula = "logits = A + B + MLP([A; B]) over the heads;  A the scaled scores, B the base's bias, one hidden layer"

    needs_scores = True

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        base: str = "kerple_log",
        base_options: Mapping[str, Any] | None = None,
        units: int = 32,
    ) -> None:
        if base_options is not None and not isinstance(base_options, Mapping):
            raise ValueError(f"base_options must be a dictionary of options of {base!r}, not {base_options!r}.")
        inner = encoding(base, heads, head_dim, **(base_options or {}))
        if inner.places != ("score",):
            raise ValueError(
                f"{type(self).__name__} adapts a bias on the scores, but the place of {base!r} is: {inner.place}. "
                "Choose a base that acts on the score only."
            )
        super().__init__(heads, head_dim, inner.width)
        self.base, self.gate_size = inner, inner.gate_size
        self.bidirectional, self.depends_on_length = inner.bidirectional, inner.depends_on_length
        self.alternatives = tuple(f"{base} as its base" for base in inner.alternatives)
        self.first, self.second = self.layers(2 * heads, integer_at_least("units", units), heads)

    @classmethod
    def options_for_length(cls, options: Mapping[str, Any], length: int) -> dict[str, Any]:
        filled = super().options_for_length(options, length)
        base: str = filled.get("base", options_of(cls)["base"].default)
        base_options = filled.get("base_options") or {}
        if not isinstance(base_options, Mapping):
            return filled  # `__init__` refuses it
        base_options = encoding_class(base).options_for_length(base_options, length)
        return {**filled, "base_options": base_options} if base_options else filled

    def layers(self, inputs: int, units: int, outputs: int) -> tuple[Layer, Layer]:
        """The network's two layers."""
        return nn.Linear(inputs, units), nn.Linear(units, outputs)

    def gates(self, hidden: Tensor) -> Tensor | None:
        return self.base.gates(hidden)

    def adapt(self, stack: Tensor, visible: Tensor) -> Tensor:
        """The network over the stacked scores and biases (batch, 2·heads, rows, keys): (batch, heads, rows, keys)."""
        units = F.leaky_relu(in_dtype(self.first, stack.movedim(1, -1)))
        return in_dtype(self.second, units).movedim(-1, 1)

    def bias(self, call: Call) -> Scored:
        base = self.base.located_bias(call)
        assert base is not None

        def function(i: Tensor, j: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
            bias = base.block(i, j, scores, visible)
            # What the base masks with −inf stays masked; the network must not compute with it.
            finite = bias.masked_fill(bias == -torch.inf, 0.0)
            stack = torch.cat([scores, finite.expand_as(scores)], dim=1)  # (batch, 2·heads, rows, keys)
            return bias + self.adapt(stack, visible)

        return Scored(function, dict(base.tensors()) | dict(self.named_parameters()))


def in_dtype(layer: Layer, x: Tensor) -> Tensor:
    """A linear layer or a convolution along the keys, in the dtype of x."""
    assert layer.bias is not None
    weight, bias = layer.weight.to(x.dtype), layer.bias.to(x.dtype)
    return F.linear(x, weight, bias) if isinstance(layer, nn.Linear) else F.conv2d(x, weight, bias, padding=(0, 1))
