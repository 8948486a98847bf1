"""A network of one hidden ReLU layer of a scalar, as the piecewise-linear function it is.

f_h(x) = Σ_u out[h, u] · relu(slope[u] · x + shift[u]) + offset[h]
       = base[h] + gain[h] · x + Σ_s bend[h, s] · max(x − knot[s], 0)     for low ≤ x ≤ high

Differentiable, in float64 (there are as many numbers as units), and of fixed shape, so that it can be traced.
"""

import torch
from torch import Tensor

from relpos.encodings.forms import Scaled


def hinges(form: Scaled, inverse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Knots (units,) ascending, base (heads,), gain (heads,) and bend (heads, units) of the form's function.

    `inverse` is 1 / row. Only units whose sign changes within the range of x bend; a unit that is on everywhere is
    linear, one that is off everywhere is nothing. So no knot is far away, however small a slope is.
    """
    slope, shift, out, offset = (x.double() for x in (form.slope, form.shift, form.out, form.offset))
    with torch.no_grad():
        low, high = value_range(form.table.double(), inverse.double())
        on_at_low, on_at_high = slope * low + shift > 0, slope * high + shift > 0
        bends = on_at_low != on_at_high
        linear = on_at_low  # on everywhere, or on until its knot: then the bend takes back what it gives
    knot = torch.where(bends, -shift / torch.where(bends, slope, 1.0), high)  # (units,)
    straight = out * linear  # (heads, units)
    bend = out * slope.abs() * bends
    order = knot.detach().argsort()
    return knot[order], straight @ shift + offset, straight @ slope, bend[:, order]


def value_range(table: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest of all products table · inverse."""
    corners = torch.outer(torch.stack(table.aminmax()), torch.stack(inverse.aminmax()))
    return corners.min(), corners.max()
