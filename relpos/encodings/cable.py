"""CABLE: distances in learned steps that depend on the tokens, plain, weighted by the query, or under a kernel."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.forms.bias import Form, RankOne, Scored
from relpos.forms.call import Call
from relpos.forms.checks import boolean
from relpos.forms.encoding import Encoding
from relpos.forms.parameters import Gate

STEPS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "softplus": F.softplus}


class CableNoWeight(Encoding):
    """CABLE without the query's weight: distances measured in learned steps that depend on the tokens.

    Each token adds a step S to a running sum per head; the distance of two tokens is the sum of the steps between them.

    Args:
        step: Non-linearity of the steps: "relu", or "softplus" as in the first public version of the code.
    """

    paper = "Veisi et al. 2025, arXiv 2503.08067"
    formula = "B_ij = −|S_i − S_j|,  S_i = Σ_{t ≤ i} ReLU(w_c·x_t + b_c);  w starts at N(0, 0.02), b at 0"

    gate_size = 1

    def __init__(
        self, heads: int, head_dim: int, *, width: int | None = None, step: Literal["relu", "softplus"] = "relu"
    ) -> None:
        super().__init__(heads, head_dim, width)
        self.step = step
        self.steps = Gate(self.width, heads)
        self.weights: Gate | None = None  # of the queries

    def gates(self, hidden: Tensor) -> Tensor:
        step = STEPS[self.step](self.steps(hidden))  # (batch, heads, length)
        if self.weights is None:
            return step[..., None]
        return torch.stack([step, F.softplus(self.weights(hidden))], dim=-1)

    def bias(self, call: Call) -> Form:
        assert call.gates is not None
        step, *weight = call.gates.to(call.dtype).unbind(-1)
        return RankOne.of_steps(step, weight[0] if weight else None, call.dtype, symmetric=not call.causal)

    def increments(self, gates: Tensor) -> tuple[Tensor, Tensor | None] | None:
        return gates[..., 0], gates[..., 1] if gates.shape[-1] > 1 else None


class Cable(CableNoWeight):
    """CABLE: context-aware biases, distances in learned steps times a weight per query.

    Steps and weights are computed from the layer's input, one of each per token and head.
    """

    formula = (
        "B_ij = −g_i·|S_i − S_j|,  S_i = Σ_{t ≤ i} ReLU(w_c·x_t + b_c),  g_i = softplus(w_s·x_i + b_s);  "
        "w starts at N(0, 0.02), b at 0"
    )

    gate_size = 2

    def __init__(
        self, heads: int, head_dim: int, *, width: int | None = None, step: Literal["relu", "softplus"] = "relu"
    ) -> None:
        super().__init__(heads, head_dim, width=width, step=step)
        self.weights = Gate(self.width, heads)


class KernelCable(CableNoWeight):
    """Kernelised CABLE: the distance of cable_nw under a logarithmic kernel.

    Args:
        weighted: Multiply by the weight of the query, as in `cable`: B_ij = −g_i·log(1 + (S_i − S_j)²).
    """

    formula = "B_ij = −log(1 + (S_i − S_j)²),  S_i = Σ_{t ≤ i} ReLU(w_c·x_t + b_c);  w starts at N(0, 0.02), b at 0"

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        width: int | None = None,
        step: Literal["relu", "softplus"] = "relu",
        weighted: bool = False,
    ) -> None:
        super().__init__(heads, head_dim, width=width, step=step)
        if boolean("weighted", weighted):
            self.weights, self.gate_size = Gate(self.width, heads), 2

    def bias(self, call: Call) -> Form:
        distance = super().bias(call)
        assert isinstance(distance, RankOne)

        def bias(i: Tensor, j: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
            kernel = -torch.log1p(distance.gained(i, j) ** 2)
            return kernel if distance.weight is None else distance.weight[:, :, i, None] * kernel

        return Scored(bias, dict(distance.tensors()), by_head=True)

    def increments(self, gates: Tensor) -> None:
        return None
