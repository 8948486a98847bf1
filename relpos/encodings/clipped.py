"""One learned number per head and distance up to a limit: what the CABLE authors call "T5-bias" (Figure 14)."""

import torch
from torch import nn

from relpos.encodings.call import Call
from relpos.encodings.encoding import Encoding, whole
from relpos.encodings.forms import Toeplitz


class Clipped(Encoding):
    """A learned table over clipped distances."""

    place = "score"
    form = "Toeplitz"
    learns = "2·limit + 1; by default 513"
    directions = "both"
    paper = "Shaw et al. 2018, arXiv 1803.02155; as in CABLE, arXiv 2503.08067"
    formula = "B_ij = b_h[clamp(i − j, −limit, limit)];  started at N(0, 0.02)"
    options = {"limit": "largest distance with an entry of its own"}
    tables = ("table",)

    def __init__(self, heads: int, head_dim: int, *, limit: int = 256) -> None:
        super().__init__(heads, head_dim)
        self.limit = whole("limit", limit)
        self.table = nn.Parameter(torch.randn(heads, 2 * limit + 1) * 0.02)  # distance −limit first

    def bias(self, call: Call) -> Toeplitz:
        column = call.distances.long().clamp(-self.limit, self.limit) + self.limit  # (distances,)
        return Toeplitz(self.table.to(call.dtype)[:, column], call.zero)
