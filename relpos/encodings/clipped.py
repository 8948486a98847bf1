from typing import Literal

import torch
from torch import Tensor, nn

from relpos.forms.bias import Toeplitz
from relpos.forms.call import Call
from relpos.forms.checks import integer_at_least
from relpos.forms.encoding import Encoding


class Clipped(Encoding):
    """A learned value per head and distance up to a limit (CABLE's "T5-bias"; T5's own log buckets are `t5`).

    Distances beyond the limit share the value at the limit.

    Args:
        limit: Largest distance with a value of its own. The table is (heads, 2·limit + 1).
        divisor: What q·k is divided by the root of: "head_dim", or "width" (heads·head_dim) as in the CABLE authors'
            code, where queries are multiplied by (head_dim / width)^½ before the usual scale.
    """

    paper = "Shaw et al. 2018, arXiv 1803.02155; as in CABLE, arXiv 2503.08067"
    formula = "B_ij = b_h[clamp(i − j, −limit, limit)];  b starts at N(0, 0.02)"
    tables = ("table",)

    def __init__(
        self, heads: int, head_dim: int, *, limit: int = 256, divisor: Literal["head_dim", "width"] = "head_dim"
    ) -> None:
        super().__init__(heads, head_dim)
        self.limit, self.divisor = integer_at_least("limit", limit), divisor
        self.table = nn.Parameter(torch.randn(heads, 2 * limit + 1) * 0.02)  # distance −limit first

    @property
    def places(self) -> tuple[str, ...]:
        return ("score",) if self.divisor == "head_dim" else super().places

    def query_factor(self, call: Call) -> Tensor | None:
        if self.divisor == "head_dim":
            return None
        factor = (self.head_dim / self.width) ** 0.5
        return torch.full((1, 1, call.queries, 1), factor, dtype=call.dtype, device=call.device)

    def bias(self, call: Call) -> Toeplitz:
        column = call.distances.long().clamp(-self.limit, self.limit) + self.limit  # (distances,)
        return Toeplitz(self.table.to(call.dtype)[:, column], call.zero, ends=(-self.limit, self.limit))
