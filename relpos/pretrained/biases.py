"""Biases that a model hands to its attention, as forms."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from relpos.forms.bias import Form, RankOne, Scored, Sum
from relpos.forms.call import Call
from relpos.forms.encoding import Encoding

Bias = Callable[[Call], Form | None]


class ModelsOwn(Encoding):
    """The biases of a checkpoint's own code, for one call of attention.

    Args:
        heads: Number of attention heads.
        head_dim: Size of a head.
        biases: Functions of the call that return forms.
    """

    paper = "the model's own"
    formula = "B = the sum of what the model's code adds to the scores"

    def __init__(self, heads: int, head_dim: int, biases: tuple[Bias, ...]) -> None:
        super().__init__(heads, head_dim)
        self.biases = biases

    def bias(self, call: Call) -> Form | None:
        forms = tuple(form for form in (bias(call) for bias in self.biases) if form is not None)
        if len(forms) < 2:
            return forms[0] if forms else None
        return Sum(forms)


def dense(bias: Tensor) -> Bias:
    """A bias that the model has materialised: broadcasts to (batch, heads, queries, keys)."""

    def make(call: Call) -> Form:
        numbers = bias.to(call.dtype)

        def block(i: Tensor, j: Tensor, scores: Any = None, visible: Any = None) -> Tensor:
            rows = numbers if numbers.shape[-2] == 1 else numbers.index_select(-2, i - call.first)
            columns = rows if rows.shape[-1] == 1 or rows.shape[-1] == len(j) else rows[..., : len(j)]
            return columns.expand(-1, call.heads, len(i), len(j))

        return Scored(block, {"bias": numbers})

    return make


def by_key(bias: Tensor) -> Bias:
    """A bias per key alone, (1 or batch, heads, keys), in causal attention.

    A constant per query changes no weight, so that bias_j may become bias_j − bias_i: the growth of a running sum.
    """

    def make(call: Call) -> Form:
        total = bias.to(torch.float64).expand(call.batch, call.heads, -1)
        return RankOne(total.contiguous(), None, call.dtype)

    return make
