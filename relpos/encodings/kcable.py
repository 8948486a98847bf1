"""Kernelised CABLE: a logarithmic kernel of CABLE's unweighted distance."""

import torch
from torch import Tensor

from relpos.encodings.cable import CableNoWeight
from relpos.encodings.call import Call
from relpos.encodings.encoding import Encoding
from relpos.encodings.forms import Scored


class KernelCable(Encoding):
    """CABLE's distance under a logarithmic kernel."""

    place = "score"
    form = "Scored"
    learns = "width + 1"
    directions = "both"
    paper = "Veisi et al. 2025, arXiv 2503.08067"
    formula = "B_ij = −log(1 + (S_i − S_j)²),  S as in cable_nw"
    options = {
        "width": "size of the layer's input; heads × head_dim unless given",
        "step": "non-linearity of the steps: relu, or softplus as in the first public version",
    }

    gate_size = 1

    def __init__(self, heads: int, head_dim: int, *, width: int | None = None, step: str = "relu") -> None:
        super().__init__(heads, head_dim, width)
        self.cable = CableNoWeight(heads, head_dim, width=width, step=step)

    def gates(self, hidden: Tensor) -> Tensor:
        return self.cable.gates(hidden)

    def bias(self, call: Call) -> Scored:
        distance = self.cable.bias(call)
        kernel = lambda i, j, scores, visible: -torch.log1p(distance.gained(i, j) ** 2)  # noqa: E731
        return Scored(kernel, dict(distance.tensors()))
