import math
from typing import Literal

import torch

from relpos.forms.bias import Toeplitz
from relpos.forms.call import Call
from relpos.forms.encoding import Encoding


def geometric(heads: int) -> list[float]:
    """2^(−8h/H) for every H: the slopes in the figures of the CABLE paper."""
    return [2.0 ** (-8.0 * h / heads) for h in range(1, heads + 1)]


def press(heads: int) -> list[float]:
    """The official rule: the slopes of the next lower power of two, then every second slope of the next higher."""
    lower = 2 ** math.floor(math.log2(heads))
    return geometric(lower) + geometric(2 * lower)[0::2][: heads - lower]


SLOPES = {"geometric": geometric, "press": press}


class Alibi(Encoding):
    """ALiBi: a linear penalty on distance, with one fixed slope per head.

    Args:
        slopes: Rule of the slopes. "geometric" is 2^(−8h/H) for every H, as in CABLE's figures; "press" is the rule of
            the official code, BLOOM and MPT. They differ where H is not a power of two.
    """

    paper = "Press et al. 2022, arXiv 2108.12409"
    formula = "B_ij = −m_h·|i − j|,  m_h = 2^(−8h/H)"

    def __init__(self, heads: int, head_dim: int, *, slopes: Literal["geometric", "press"] = "geometric") -> None:
        super().__init__(heads, head_dim)
        self.slopes = SLOPES[slopes](heads)

    def bias(self, call: Call) -> Toeplitz:
        slopes = torch.tensor(self.slopes, dtype=call.dtype, device=call.device)
        return Toeplitz(-slopes[:, None] * call.distances.abs(), call.zero)
