"""A network with one hidden ReLU layer and a scalar input, written as a piecewise-linear function.

f_h(x) = Σ_u out[h, u] · relu(slope[u] · x + shift[u]) + offset[h]
       = base[h] + gain[h] · x + Σ_s bend[h, s] · max(x − knot[s], 0)     for low ≤ x ≤ high

It is differentiable, computed in float64 (there are only as many values as units), and has a fixed shape, so that it
can be traced.
"""

import torch
from torch import Tensor

from relpos.forms.bias import Scaled


def hinges(form: Scaled, inverse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Knots (units,) ascending, base (heads,), gain (heads,) and bend (heads, units) of the form's function.

    `inverse` is 1 / row. Only units whose sign changes within the range of x have a knot; a unit that is positive
    everywhere is linear, and a unit that is negative everywhere is 0. So every knot lies in the range of x, however
    small a slope is.
    """
    slope, shift, out, offset = (x.double() for x in (form.slope, form.shift, form.out, form.offset))
    with torch.no_grad():
        low, high = value_range(form.table.double(), inverse.double())
        on_at_low, on_at_high = slope * low + shift > 0, slope * high + shift > 0
        bends = on_at_low != on_at_high
        linear = on_at_low  # positive everywhere, or up to its knot, after which the bend cancels it
    knot = torch.where(bends, -shift / torch.where(bends, slope, 1.0), high)  # (units,)
    straight = out * linear  # (heads, units)
    bend = out * slope.abs() * bends
    order = knot.detach().argsort()
    return knot[order], straight @ shift + offset, straight @ slope, bend[:, order]


def value_range(table: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of all products table · inverse."""
    corners = torch.outer(torch.stack(table.aminmax()), torch.stack(inverse.aminmax()))
    return corners.min(), corners.max()
