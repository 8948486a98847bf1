import torch
from torch import Tensor, nn

from relpos.forms.checks import integer_at_least
from relpos.forms.encoding import Encoding


class Learned(Encoding):
    """Learned absolute positions: one learned vector per position, added to the token embedding.

    Args:
        length: Number of positions; longer inputs are refused. The table is (length, width).
    """

    paper = "Gehring et al. 2017, arXiv 1705.03122; as in GPT-2 and BERT"
    formula = "x_i ← x_i + p_i,  i < length;  p starts at N(0, 0.02)"

    def __init__(self, heads: int, head_dim: int, *, length: int = 1024, width: int | None = None) -> None:
        super().__init__(heads, head_dim, width)
        self.length = integer_at_least("length", length)
        self.weight = nn.Parameter(torch.randn(length, self.width) * 0.02)  # the name it has in GPT-2: wpe.weight

    def embed(self, x: Tensor, start: int = 0, documents: Tensor | None = None) -> Tensor:
        positions = self.positions_of(x, start, documents)  # (1 or batch, length)
        if int(positions.max()) >= self.length:
            raise ValueError(
                f"learned has {self.length} positions and cannot embed position {int(positions.max())}: "
                "shorten the input, or use an encoding that works past its trained length."
            )
        return x + self.weight[positions].to(x.dtype)
