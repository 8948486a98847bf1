"""CoPE: positions counted by gates that are computed from the scores (not the "clipped RoPE" of the same name)."""

import torch
from torch import Tensor, nn

from relpos.forms.bias import Scored, running_sum
from relpos.forms.call import Call
from relpos.forms.checks import integer_at_least
from relpos.forms.encoding import Encoding


class Cope(Encoding):
    """CoPE, contextual position encoding: positions counted by gates of the scores.

    Args:
        npos: Number of positions; counts are capped at npos − 1. The table is (npos, head_dim), shared by the heads.
        scaled: Whether the gates read the scaled scores, as the authors' code does. If False they read q·k, as in the
            paper's formula.
    """

    paper = "Golovneva et al. 2024, arXiv 2405.18719"
    formula = (
        "B_ij = q_i·e[p_ij],  p_ij = min(Σ_{t=j..i} σ(a_it), npos − 1),  a the scaled scores;  "
        "e interpolated linearly, starts at 0"
    )

    needs_scores = True
    bidirectional = False
    alternatives = ("cable", "dape")

    def __init__(self, heads: int, head_dim: int, *, npos: int = 64, scaled: bool = True) -> None:
        super().__init__(heads, head_dim)
        self.npos = integer_at_least("npos", npos, least=2)
        self.scaled = scaled
        self.table = nn.Parameter(torch.zeros(npos, head_dim))  # shared by the heads, as in the paper

    def bias(self, call: Call) -> Scored:
        assert call.q is not None
        value = call.q @ self.table.to(call.dtype).T  # (batch, heads, queries, npos): q_i·e at the integer positions
        temperature = 1.0 if self.scaled else call.scale

        def function(i: Tensor, j: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
            gates = torch.sigmoid(scores / temperature).masked_fill(~visible, 0.0)
            count = running_sum(gates.flip(-1)).flip(-1).clamp(max=self.npos - 1)  # Σ over t ≥ j
            below = count.detach().floor()
            rows = value[:, :, i - call.first]  # (batch, heads, rows, npos)
            low = rows.gather(-1, below.long())
            high = rows.gather(-1, (below.long() + 1).clamp(max=self.npos - 1))
            return torch.lerp(low, high, count - below)

        return Scored(function, {"table": self.table}, by_head=True)
