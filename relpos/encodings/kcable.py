"""Kernelised CABLE: a logarithmic kernel of CABLE's unweighted distance."""

import torch
from torch import Tensor

from relpos.encodings.cable import CableNoWeight
from relpos.forms.bias import Form, RankOne, Scored
from relpos.forms.call import Call


class KernelCable(CableNoWeight):
    """Kernelised CABLE: the distance of cable_nw under a logarithmic kernel."""

    formula = "B_ij = −log(1 + (S_i − S_j)²),  S as in cable_nw"

    def bias(self, call: Call) -> Form:
        distance = super().bias(call)
        assert isinstance(distance, RankOne)

        def kernel(i: Tensor, j: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
            return -torch.log1p(distance.gained(i, j) ** 2)

        return Scored(kernel, dict(distance.tensors()), by_head=True)

    def increments(self, gates: Tensor) -> None:
        return None
