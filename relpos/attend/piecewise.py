"""A network with one hidden ReLU layer and a scalar input, as a piecewise-linear function: by hinges, or by pieces.

f_h(x) = Σ_u out[h, u] · relu(slope[u] · x + shift[u]) + offset[h]
       = base[h] + gain[h] · x + Σ_s bend[h, s] · max(x − knot[s], 0)     for low ≤ x ≤ high     (hinges)
       = base[h, s] + gain[h, s] · (x − centre[s])       in piece s, the number of edges below x (pieces)

Both are differentiable, computed in float64 (there are only as many values as units), and have a fixed shape, so that
they can be traced.
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


def pieces(form: Scaled) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The pieces of the form's function, float32. Gradients of slope, shift, out and offset flow through the last two.

    A unit changes its sign at its edge −shift / slope. Each piece is written around a centre in its own range, so that
    nothing cancels.

    Returns:
        Edges (units,), ascending; centres (pieces,); bases and gains (heads, pieces). Pieces are one more than units.
    """
    slope, shift, out, offset = (x.double() for x in (form.slope, form.shift, form.out, form.offset))
    with torch.no_grad():
        edges, order = torch.where(slope == 0, torch.inf, -shift / slope).sort()  # (units,)
        units = len(edges)
        scale = form.row if form.column is None else torch.cat([form.row.flatten(), form.column.flatten()])
        low, high = value_range(form.table.double(), scale.double().reciprocal())
        centres = torch.cat([edges[:1], edges]).clamp(low, high)  # (pieces,)
        passed = torch.ones(units + 1, units, dtype=torch.bool, device=edges.device).tril(-1)  # edges below each piece
    slope, shift, out = slope[order], shift[order], out[:, order]
    rises, falls = slope.detach() > 0, slope.detach() < 0
    active = torch.where(rises, passed, torch.where(falls, ~passed, shift.detach() > 0))  # (pieces, units)
    bases = out @ ((slope * centres[:, None] + shift) * active).T + offset[:, None]  # (heads, pieces)
    gains = out @ (slope * active).T  # (heads, pieces)
    return edges.float(), centres.float(), bases.float(), gains.float()
