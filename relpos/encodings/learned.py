"""Learned absolute positions, added to the token embedding."""

import torch
from torch import Tensor, nn

from relpos.encodings.encoding import Encoding, whole


class Learned(Encoding):
    """A learned vector a position."""

    place = "embedding"
    form = "none"
    learns = "length·width/H; by default 1024·width/H"
    directions = "both"
    paper = "Gehring et al. 2017, arXiv 1705.03122; as in GPT-2 and BERT"
    formula = "x_i ← x_i + p_i,  i < length;  started at N(0, 0.02)"
    options = {
        "length": "number of positions; longer inputs are refused",
        "width": "size of the embedding; heads × head_dim unless given",
    }

    def __init__(self, heads: int, head_dim: int, *, length: int = 1024, width: int | None = None) -> None:
        super().__init__(heads, head_dim, width)
        self.length = whole("length", length)
        self.weight = nn.Parameter(torch.randn(length, self.width) * 0.02)  # the name it has in GPT-2: wpe.weight

    def embed(self, x: Tensor, start: int = 0, documents: Tensor | None = None) -> Tensor:
        positions = self.standing(x, start, documents)  # (1 or batch, length)
        if int(positions.max()) >= self.length:
            raise ValueError(
                f"learned has {self.length} positions and cannot embed position {int(positions.max())}: "
                "shorten the input, or use an encoding that goes past its trained length."
            )
        return x + self.weight[positions].to(x.dtype)
