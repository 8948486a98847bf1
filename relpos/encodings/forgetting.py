"""The forget gate of the Forgetting Transformer (FoX), as a bias."""

from torch import Tensor
from torch.nn import functional as F

from relpos.encodings.call import Call
from relpos.encodings.encoding import Encoding
from relpos.encodings.forms import RankOne
from relpos.encodings.gate import Gate


class Forgetting(Encoding):
    """A learned forget gate a token and head."""

    place = "score"
    form = "RankOne"
    learns = "width + 1"
    directions = "causal"
    paper = "Lin et al. 2025, arXiv 2503.02130"
    formula = "B_ij = Σ_{t=j+1..i} log σ(w·x_t + b);  w started at N(0, 0.02), b at 0"
    options = {"width": "size of the layer's input; heads × head_dim unless given"}

    gate_size = 1

    def __init__(self, heads: int, head_dim: int, *, width: int | None = None) -> None:
        super().__init__(heads, head_dim, width)
        self.gate = Gate(self.width, heads)

    def gates(self, hidden: Tensor) -> Tensor:
        return F.logsigmoid(self.gate(hidden))[..., None]  # (batch, heads, length, 1)

    def bias(self, call: Call) -> RankOne:
        assert call.gates is not None
        forgotten = -call.gates[..., 0].double().cumsum(-1)  # (batch, heads, keys)
        return RankOne(forgotten, None, call.dtype)
