"""CABLE: distances measured by what the tokens themselves say, weighted by the query."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.encodings.call import Call
from relpos.encodings.encoding import Encoding
from relpos.encodings.forms import RankOne
from relpos.encodings.gate import Gate
from relpos.errors import unknown

STEPS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "softplus": F.softplus}


class CableNoWeight(Encoding):
    """CABLE without the query's weight: distances counted in learned steps."""

    place = "score"
    form = "RankOne"
    learns = "width + 1"
    directions = "both"
    paper = "Veisi et al. 2025, arXiv 2503.08067"
    formula = "B_ij = −|S_i − S_j|,  S = cumsum(ReLU(w_c·x + b_c));  w started at N(0, 0.02), b at 0"
    options = {
        "width": "size of the layer's input; heads × head_dim unless given",
        "step": "non-linearity of the steps: relu, or softplus as in the first public version",
    }

    gate_size = 1

    def __init__(self, heads: int, head_dim: int, *, width: int | None = None, step: str = "relu") -> None:
        super().__init__(heads, head_dim, width)
        if step not in STEPS:
            raise unknown("step", step, STEPS)
        self.step = step
        self.steps = Gate(self.width, heads)

    def gates(self, hidden: Tensor) -> Tensor:
        return STEPS[self.step](self.steps(hidden))[..., None]  # (batch, heads, length, 1)

    def bias(self, call: Call) -> RankOne:
        assert call.gates is not None
        total = call.gates[..., 0].double().cumsum(-1)  # (batch, heads, keys)
        weight = call.gates[..., 1].to(call.dtype) if call.gates.shape[-1] > 1 else None
        return RankOne(total, weight, call.dtype, symmetric=not call.causal)


class Cable(CableNoWeight):
    """Context-aware biases for length extrapolation."""

    learns = "2·width + 2"
    formula = "B_ij = −g_i·|S_i − S_j|,  S as in cable_nw,  g = softplus(w_s·x + b_s);  w started at N(0, 0.02), b at 0"

    gate_size = 2

    def __init__(self, heads: int, head_dim: int, *, width: int | None = None, step: str = "relu") -> None:
        super().__init__(heads, head_dim, width=width, step=step)
        self.weights = Gate(self.width, heads)

    def gates(self, hidden: Tensor) -> Tensor:
        return torch.cat([super().gates(hidden), F.softplus(self.weights(hidden))[..., None]], dim=-1)
