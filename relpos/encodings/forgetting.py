from torch import Tensor
from torch.nn import functional as F

from relpos.forms.bias import RankOne
from relpos.forms.call import Call
from relpos.forms.encoding import Encoding
from relpos.forms.parameters import Gate


class Forgetting(Encoding):
    """FoX, the Forgetting Transformer: the sum of the logarithms of forget gates between key and query.

    There is one gate per token and head, computed from the layer's input.
    """

    paper = "Lin et al. 2025, arXiv 2503.02130"
    formula = "B_ij = Σ_{t=j+1..i} log σ(w·x_t + b);  w starts at N(0, 0.02), b at 0"

    gate_size = 1
    bidirectional = False
    alternatives = ("cable_nw with step=softplus", "cable")

    def __init__(self, heads: int, head_dim: int, *, width: int | None = None) -> None:
        super().__init__(heads, head_dim, width)
        self.gate = Gate(self.width, heads)

    def gates(self, hidden: Tensor) -> Tensor:
        return F.logsigmoid(self.gate(hidden))[..., None]  # (batch, heads, length, 1)

    def bias(self, call: Call) -> RankOne:
        assert call.gates is not None
        return RankOne.of_steps(*self.increments(call.gates.to(call.dtype)), call.dtype)

    def increments(self, gates: Tensor) -> tuple[Tensor, None]:
        return -gates[..., 0], None
