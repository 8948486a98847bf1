"""A bias in the kernel's own layout, kept between decoding steps."""

import ctypes

import torch
from torch import Tensor

from relpos.attend.native import library, operators
from relpos.attend.native.library import constant, load
from relpos.attend.native.problem import Inputs
from relpos.attend.native.rank_one import make_totals, set_rows
from relpos.forms.bias import Form, terms
from relpos.forms.call import Call


class PackedBias:
    """A bias that does not depend on the input, in causal attention, for all tokens below a capacity.

    Args:
        form: The bias, for as many queries and keys as the capacity; `native.refuses_call` has not refused it.
        capacity: Number of tokens.
    """

    def __init__(self, form: Form, capacity: int) -> None:
        nothing = torch.empty(0)
        inputs, call = Inputs(nothing, nothing, nothing), Call(capacity, capacity)
        for term in terms(form):
            operators.FILES[type(term)].describe(term, call, inputs)
        self.tensors: list[Tensor] = []  # kept alive
        problem = library.interface().problem()
        operators.fill(problem, inputs, self.keep)
        values = {item[0]: getattr(problem, item[0]) for item in problem._fields_}
        self.fields = {name: value for name, value in values.items() if isinstance(value, int | float) and value}

    @property
    def scaled(self) -> bool:
        """Whether there is one factor per position, so that positions must not restart."""
        return "knots" in self.fields

    def keep(self, x: Tensor) -> Tensor:
        """The tensor, contiguous, kept alive as long as this object."""
        self.tensors.append(x.contiguous())
        return self.tensors[-1]

    def fill(self, p: ctypes.Structure) -> None:
        """Set the fields of the bias."""
        for name, value in self.fields.items():
            setattr(p, name, value)
        if p.inverse:
            p.inverse += p.start * ctypes.sizeof(ctypes.c_float)  # one factor per query, from the first one on


class RunningTotals:
    """A RankOne bias that grows with every decoded token.

    The unit of the totals is the one that suited the first tokens. If later ones leave its range, `append` says so, and
    the totals must be packed again.

    Args:
        step: By how much each token so far raises the total, (batch, heads, tokens).
        weight: Of each token, in the same shape; None means 1.
        capacity: Number of tokens that there is room for.

    Attributes:
        length: Number of tokens so far.
        fits: Whether all numbers are finite.
    """

    def __init__(self, step: Tensor, weight: Tensor | None, capacity: int) -> None:
        self.capacity, self.length, self.weighted = capacity, step.shape[2], weight is not None
        # high, low and weight: (3, batch, heads, capacity + pad)
        self.rows = torch.empty(3, *step.shape[:2], capacity + constant("ROW_PAD"), dtype=torch.float32)
        self.unit = torch.empty(step.shape[:2], dtype=torch.float64)
        answer = load().relpos_pack_totals(make_totals(None, step, weight, self.rows, self.unit))
        self.fits = bool(answer == constant("OK"))

    def append(self, step: Tensor, weight: Tensor | None) -> bool:
        """Add tokens, and return whether there was room and the numbers are in the range of the unit."""
        first, self.length = self.length, self.length + step.shape[2]
        if self.length > self.capacity:
            return False
        answer = load().relpos_append_totals(make_totals(None, step, weight, self.rows, self.unit), first)
        return bool(answer == constant("OK"))

    def crop(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        self.length = min(self.length, length)

    def fill(self, p: ctypes.Structure) -> None:
        """Set the fields of the bias."""
        p.form = constant("RANK_ONE")
        set_rows(p, self.rows, self.weighted, symmetric=False)
