import torch

from relpos.forms.bias import Toeplitz
from relpos.forms.call import Call
from relpos.forms.checks import integer_at_least, positive_number
from relpos.forms.encoding import Encoding


class Sandwich(Encoding):
    """Sandwich: the inner product of two sinusoidal embeddings, as a bias.

    Args:
        dim: Size d of the sinusoidal embeddings, even; head_dim if None.
        base: Base of the wavelengths; 10000 in the paper.
    """

    paper = "Chi et al. 2023, arXiv 2212.10356"
    formula = "B_ij = (Σ_{k=1..d/2} cos((i − j) / 10000^(2k/d)) − d/2)·H/(8h)"

    def __init__(self, heads: int, head_dim: int, *, dim: int | None = None, base: float = 10000.0) -> None:
        super().__init__(heads, head_dim)
        self.dim = integer_at_least("dim", head_dim if dim is None else dim, least=2)
        if self.dim % 2:
            raise ValueError(f"sandwich sums over pairs: dim, by default head_dim, must be even, not {self.dim}.")
        self.base = positive_number("base", base)

    def bias(self, call: Call) -> Toeplitz:
        k = torch.arange(1, self.dim // 2 + 1, dtype=call.dtype, device=call.device)  # (dim / 2,)
        waves = torch.cos(call.distances[:, None] / self.base ** (2 * k / self.dim))  # (distances, dim / 2)
        head = torch.arange(1, self.heads + 1, dtype=call.dtype, device=call.device)
        # Σ (cos − 1) and not Σ cos − d/2: exactly 0 at distance 0, and never above it.
        return Toeplitz((self.heads / (8 * head))[:, None] * (waves - 1).sum(-1), call.zero)
