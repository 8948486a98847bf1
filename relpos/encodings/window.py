"""A sliding window: a token sees only the nearest ones."""

import torch

from relpos.encodings.call import Call
from relpos.encodings.encoding import Encoding, whole
from relpos.encodings.forms import Toeplitz


class Window(Encoding):
    """Sliding-window attention, as a bias of 0 inside the window and −inf outside."""

    place = "score"
    form = "Toeplitz"
    learns = "0"
    directions = "both"
    paper = "Beltagy et al. 2020 (Longformer), arXiv 2004.05150; as in Mistral, arXiv 2310.06825"
    formula = "B_ij = 0 if |i − j| < size, else −inf"
    options = {"size": "tokens in the window of a causal query, its own among them; both directions: on each side"}

    def __init__(self, heads: int, head_dim: int, *, size: int = 256) -> None:
        super().__init__(heads, head_dim)
        self.size = whole("size", size)

    def bias(self, call: Call) -> Toeplitz:
        outside = call.distances.abs() >= self.size  # (distances,)
        table = torch.zeros_like(call.distances).masked_fill(outside, -torch.inf)
        return Toeplitz(table.expand(self.heads, -1), call.zero)
