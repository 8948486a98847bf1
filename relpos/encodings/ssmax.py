import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relpos.forms.call import Call, document_ends
from relpos.forms.checks import positive_number
from relpos.forms.encoding import Encoding


class Ssmax(Encoding):
    """SSMax, scalable softmax: scores grow with the logarithm of the number of tokens, with one factor per head.

    It distinguishes no two keys, so it is mostly a part of `sum`, with rope.

    n counts the tokens of the query's document: those up to its own, or in both directions all of them. Padding is not
    counted. A window, a mask and given positions do not change n.

    Args:
        start: Start value of s. With 0.168 the factor is 1 on average over the first 1,024 tokens.
    """

    paper = "Nakanishi 2025, arXiv 2501.19399"
    formula = "q_i ← s_h·log(n)·q_i,  n the number of tokens that i sees;  s starts at 0.168"

    def __init__(self, heads: int, head_dim: int, *, start: float = 0.168) -> None:
        super().__init__(heads, head_dim)
        self.s = nn.Parameter(torch.full((heads,), positive_number("start", start)))

    def query_factor(self, call: Call) -> Tensor:
        n = seen_tokens(call).clamp(min=1).to(call.dtype)[:, None, :, None]  # (1 or batch, 1, queries, 1)
        return self.s.to(call.dtype)[:, None, None] * n.log()


def seen_tokens(call: Call) -> Tensor:
    """Number of tokens of its document that each query sees, padding left out: (1 or batch, queries)."""
    first, end = torch.zeros_like(call.i)[None], torch.full_like(call.i, call.keys)[None]  # (1, queries)
    if call.documents is not None:
        first, end = (ends[:, call.i] for ends in document_ends(call.documents))  # (batch, queries)
    if call.causal:
        end = end.minimum(call.i + 1)
    if call.padding is None:
        return end - first
    before = F.pad(call.padding.long().cumsum(1), (1, 0))  # (batch, keys + 1)
    rows = (len(before), call.queries)
    return before.gather(1, end.expand(rows)) - before.gather(1, first.expand(rows))
