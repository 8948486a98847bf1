"""CoPE: positions counted in gates that the scores themselves open (not the "clipped RoPE" of the same name)."""

import torch
from torch import Tensor, nn

from relpos.encodings.call import Call
from relpos.encodings.encoding import Encoding, whole
from relpos.encodings.forms import Scored


class Cope(Encoding):
    """Contextual position encoding."""

    place = "score"
    form = "Scored"
    learns = "npos·d/H; by default 64·d/H"
    directions = "causal"
    paper = "Golovneva et al. 2024, arXiv 2405.18719"
    formula = (
        "B_ij = q_i·e[p_ij],  p_ij = min(Σ_{t=j..i} σ(a_it), npos − 1),  a the scaled scores;  "
        "e interpolated linearly, started at 0"
    )
    options = {
        "npos": "number of positions; counts are capped at npos − 1",
        "scaled": "gate on the scaled scores, as the authors' code does; if false on q·k, as the paper's formula reads",
    }

    def __init__(self, heads: int, head_dim: int, *, npos: int = 64, scaled: bool = True) -> None:
        super().__init__(heads, head_dim)
        self.npos = whole("npos", npos, least=2)
        self.scaled = scaled
        self.table = nn.Parameter(torch.zeros(npos, head_dim))  # shared by the heads, as in the paper

    @property
    def needs_scores(self) -> bool:
        return True

    def bias(self, call: Call) -> Scored:
        assert call.q is not None
        value = call.q @ self.table.to(call.dtype).T  # (batch, heads, queries, npos): q_i·e at the whole positions
        temperature = 1.0 if self.scaled else call.scale

        def function(i: Tensor, j: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
            gates = torch.sigmoid(scores / temperature).masked_fill(~visible, 0.0)
            count = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=self.npos - 1)  # Σ over t ≥ j
            below = count.detach().floor()
            rows = value[:, :, i - (call.keys - call.queries)]  # (batch, heads, rows, npos)
            low = rows.gather(-1, below.long())
            high = rows.gather(-1, (below.long() + 1).clamp(max=self.npos - 1))
            return torch.lerp(low, high, count - below)

        return Scored(function, {"table": self.table})
