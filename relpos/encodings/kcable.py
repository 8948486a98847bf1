"""Kernelised CABLE: a logarithmic kernel of CABLE's unweighted distance."""

import torch
from torch import Tensor

from relpos.encodings.cable import CableNoWeight
from relpos.encodings.call import Call
from relpos.encodings.forms import Form, RankOne, Scored


class KernelCable(CableNoWeight):
    """CABLE's distance under a logarithmic kernel."""

    form = "Scored"
    formula = "B_ij = −log(1 + (S_i − S_j)²),  S as in cable_nw"

    def bias(self, call: Call) -> Form:
        distance = super().bias(call)
        assert isinstance(distance, RankOne)

        def kernel(i: Tensor, j: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
            return -torch.log1p(distance.gained(i, j) ** 2)

        return Scored(kernel, dict(distance.tensors()))
