"""FIRE: a small network of the distance, relative to the query's position."""

import torch
from torch import nn

from relpos.encodings.call import Call
from relpos.encodings.encoding import Encoding, positive, whole
from relpos.encodings.forms import Scaled
from relpos.encodings.positive import Positive


class Fire(Encoding):
    """Functional interpolation of relative positions."""

    place = "score"
    form = "Scaled"
    learns = "units + 1 + (2·units + 2)/H; by default 33 + 66/H"
    directions = "causal"
    paper = "Li et al. 2024, arXiv 2310.04418"
    formula = "B_ij = f_h(ψ(i − j) / ψ(max(i, ℓ))),  ψ(x) = log(c·x + 1);  f: Linear–ReLU–Linear, c started at 0.1"
    options = {
        "length": "threshold ℓ at the start; the trained length",
        "c": "start of c",
        "units": "hidden units of f",
    }

    def __init__(self, heads: int, head_dim: int, *, length: int = 512, c: float = 0.1, units: int = 32) -> None:
        super().__init__(heads, head_dim)
        self.length = whole("length", length)
        self.c = Positive(torch.tensor([positive("c", c)]))  # one number, in a vector: FSDP can shard no scalar
        self.stretch = Positive(torch.tensor([1.0]))  # ℓ = length × stretch
        self.inner = nn.Linear(1, whole("units", units))
        self.outer = nn.Linear(units, heads)

    def bias(self, call: Call) -> Scaled:
        c = self.c(call.dtype)
        threshold = self.length * self.stretch(call.dtype)
        return Scaled(
            table=torch.log1p(c * call.distances),
            row=torch.log1p(c * torch.maximum(call.positions.to(call.dtype), threshold)),
            slope=self.inner.weight[:, 0].to(call.dtype),
            shift=self.inner.bias.to(call.dtype),
            out=self.outer.weight.to(call.dtype),
            offset=self.outer.bias.to(call.dtype),
        )
