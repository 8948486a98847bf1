import torch
from torch import Tensor, nn

from relpos.forms.bias import Scaled
from relpos.forms.call import Call
from relpos.forms.checks import boolean, integer_at_least, positive_number
from relpos.forms.encoding import Encoding
from relpos.forms.parameters import AbsoluteParameter, PositiveParameter

LEAST = 1e-6  # added to a divisor that may be 0, as in the official code


class Fire(Encoding):
    """FIRE, functional interpolation of relative positions: a small network of the distance over the position.

    Args:
        length: Start value of the threshold ℓ; the trained length.
        c: Start value of c.
        units: Hidden units of the network f.
        leak: Slope below 0 of f's ReLU, from 0 to 1; 0.01 is the LeakyReLU in the official code of DAPE over FIRE.
        symmetric: Whether it also runs in both directions: B_ij = f_h(ψ(|i − j|) / ψ(max(i, j, ℓ))), the same for
            causal attention.
        absolute: Train c and the factor of ℓ as they are, and use |c| and |ℓ|, as the official code does, which also
            adds 1e-6 to the divisor. By default both are positive by construction.
        initial_std: Start the network's weights at N(0, initial_std²) and its biases at 0; 0.02 in the CABLE authors'
            code. If None, both start as those of PyTorch's linear layers.
    """

    paper = "Li et al. 2024, arXiv 2310.04418"
    formula = "B_ij = f_h(ψ(i − j) / ψ(max(i, ℓ))),  ψ(x) = log(c·x + 1);  f: Linear–ReLU–Linear, c starts at 0.1"

    alternatives = ("fire with symmetric=True", "kerple_log", "t5")

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        length: int = 512,
        c: float = 0.1,
        units: int = 32,
        leak: float = 0.0,
        symmetric: bool = False,
        absolute: bool = False,
        initial_std: float | None = None,
    ) -> None:
        super().__init__(heads, head_dim)
        if not isinstance(leak, int | float) or isinstance(leak, bool) or not 0 <= leak <= 1:
            raise ValueError(f"leak must be a number from 0 (ReLU) to 1, not {leak!r}.")
        self.leak, self.symmetric, self.bidirectional = float(leak), symmetric, symmetric
        self.length = integer_at_least("length", length)
        parameter = AbsoluteParameter if boolean("absolute", absolute) else PositiveParameter
        self.least = LEAST if absolute else 0.0
        self.c = parameter(torch.tensor([positive_number("c", c)]))  # one value: FSDP cannot shard a scalar
        self.stretch = parameter(torch.tensor([1.0]))  # ℓ = length × stretch
        self.inner = nn.Linear(1, integer_at_least("units", units))
        self.outer = nn.Linear(units, heads)
        if initial_std is not None:
            for layer in (self.inner, self.outer):
                nn.init.normal_(layer.weight, std=positive_number("initial_std", initial_std))
                nn.init.zeros_(layer.bias)

    def bias(self, call: Call) -> Scaled:
        c = self.c(call.dtype)
        threshold = self.length * self.stretch(call.dtype)

        def scale(positions: Tensor) -> Tensor:
            return torch.log1p(c * torch.maximum(positions.to(call.dtype), threshold)) + self.least

        farthest = max(call.zero, len(call.distances) - 1 - call.zero)
        distances = torch.arange(farthest + 1, device=call.device, dtype=call.dtype)
        # Where given positions descend, causal attention has keys of later positions too.
        both_directions = not call.causal or (self.symmetric and call.lowest < 0)
        column = scale(call.key_positions) if both_directions else None  # (1 or batch, keys)
        table, row = torch.log1p(c * distances), scale(call.query_positions)
        return Scaled(table, row, *self.network(call.dtype), first=call.first, column=column)

    def network(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The network f as ReLU units: slope (units,), shift (units,), out (heads, units) and offset (heads,)."""
        slope, shift = self.inner.weight[:, 0].to(dtype), self.inner.bias.to(dtype)
        out, offset = self.outer.weight.to(dtype), self.outer.bias.to(dtype)
        if self.leak == 0:
            return slope, shift, out, offset
        # LeakyReLU(z) = (1 − leak)·ReLU(z) + leak·z. The part that is linear in x needs one more unit, with slope 1
        # and shift 0: x, a ratio of logarithms of numbers from 1 up, is never below 0.
        linear = self.leak * (out @ slope)  # (heads,)
        return (
            torch.cat([slope, slope.new_ones(1)]),
            torch.cat([shift, shift.new_zeros(1)]),
            torch.cat([(1 - self.leak) * out, linear[:, None]], dim=1),
            offset + self.leak * (out @ shift),
        )
