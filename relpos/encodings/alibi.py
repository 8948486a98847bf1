"""ALiBi: a penalty that grows linearly with distance, at a fixed slope a head."""

import math

import torch

from relpos.encodings.call import Call
from relpos.encodings.encoding import Encoding
from relpos.encodings.forms import Toeplitz
from relpos.errors import unknown


def geometric(heads: int) -> list[float]:
    """2^(−8h/H) for every H: what the CABLE authors drew."""
    return [2.0 ** (-8.0 * h / heads) for h in range(1, heads + 1)]


def press(heads: int) -> list[float]:
    """The official rule: the slopes of the next lower power of two, then every second one of the next higher."""
    lower = 2 ** math.floor(math.log2(heads))
    return geometric(lower) + geometric(2 * lower)[0::2][: heads - lower]


SLOPES = {"geometric": geometric, "press": press}


class Alibi(Encoding):
    """Attention with linear biases."""

    place = "score"
    form = "Toeplitz"
    learns = "0"
    directions = "both"
    paper = "Press et al. 2022, arXiv 2108.12409"
    formula = "B_ij = −m_h·|i − j|,  m_h = 2^(−8h/H)"
    options = {"slopes": "geometric: 2^(−8h/H) for every H (CABLE's figures); press: the official code, BLOOM, MPT"}

    def __init__(self, heads: int, head_dim: int, *, slopes: str = "geometric") -> None:
        super().__init__(heads, head_dim)
        if slopes not in SLOPES:
            raise unknown("slope rule", slopes, SLOPES)
        self.slopes = SLOPES[slopes](heads)

    def bias(self, call: Call) -> Toeplitz:
        slopes = torch.tensor(self.slopes, dtype=call.dtype, device=call.device)
        return Toeplitz(-slopes[:, None] * call.distances.abs(), call.zero)
