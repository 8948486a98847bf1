import torch

from relpos.forms.bias import Toeplitz
from relpos.forms.call import Call
from relpos.forms.checks import integer_at_least
from relpos.forms.encoding import Encoding


class Window(Encoding):
    """Sliding-window attention, as a bias of 0 inside the window and −inf outside.

    Together with another encoding it is a part of `sum`; in a model, `window` in a rule of a layer plan does that.

    Args:
        size: Tokens that a query sees, its own among them; in both directions, on each side.
    """

    paper = "Beltagy et al. 2020, arXiv 2004.05150"
    formula = "B_ij = 0 if |i − j| < size, else −inf"

    def __init__(self, heads: int, head_dim: int, *, size: int = 256) -> None:
        super().__init__(heads, head_dim)
        self.size = integer_at_least("size", size)

    def bias(self, call: Call) -> Toeplitz:
        outside = call.distances.abs() >= self.size  # (distances,)
        table = torch.zeros_like(call.distances).masked_fill(outside, -torch.inf)
        return Toeplitz(table.expand(self.heads, -1), call.zero)
