"""A bias in the kernel's own layout, ready for any decoding step: computed once for all tokens below a capacity."""

import ctypes

import torch
from torch import Tensor

from relpos.attend.native import library, operators
from relpos.attend.native.inputs import Inputs, Prepared
from relpos.forms.bias import Form, terms
from relpos.forms.call import Call

FIELDS = [
    "form",
    "table",
    "table_stride",
    "zero",
    "distances",
    "inverse",
    "inverse_stride",
    "knots",
    "knot",
    "base",
    "gain",
    "bend",
]


class Ready:
    """A bias that does not depend on the input, in causal attention.

    Args:
        form: The bias, for as many queries and keys as the capacity; `native.refuses_call` has not refused it.
        capacity: Number of tokens.
    """

    def __init__(self, form: Form, capacity: int) -> None:
        from relpos.attend.native import FILES  # noqa: PLC0415  (it imports this module)

        nothing = torch.empty(0)
        inputs, call = Inputs(nothing, nothing, nothing), Call(capacity, capacity)
        for term in terms(form):
            FILES[type(term)].describe(term, call, inputs)
        self.tensors: list[Tensor] = []  # kept alive
        problem = library.interface().problem()
        operators.fill(problem, inputs, self.keep)
        self.fields = {name: getattr(problem, name) for name in FIELDS}

    def keep(self, x: Tensor) -> Tensor:
        """The tensor, contiguous, kept alive as long as this object."""
        self.tensors.append(x.contiguous())
        return self.tensors[-1]

    def fill(self, prepared: Prepared) -> None:
        """Set the fields of the bias."""
        p = prepared.problem
        for name, value in self.fields.items():
            setattr(p, name, value)
        if p.inverse:
            p.inverse += p.start * ctypes.sizeof(ctypes.c_float)  # one factor per query, from the first one on
