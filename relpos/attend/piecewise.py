"""A network with one hidden ReLU layer and a scalar input, as a piecewise-linear function: by hinges, or by pieces.

f_h(x) = Σ_u out[h, u] · relu(slope[u] · x + shift[u]) + offset[h]
       = base[h] + gain[h] · x + Σ_s bend[h, s] · max(x − knot[s], 0)     for low ≤ x ≤ high     (hinges)
       = base[h, s] + gain[h, s] · (x − centre[s])       in piece s, the number of edges below x (pieces)

Both are differentiable, computed in float64 (there are only as many values as units), and have a fixed shape, so that
they can be traced.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.forms.bias import Scaled, running_sum


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


def after_knots(knot: Tensor, base: Tensor, gain: Tensor, bend: Tensor) -> tuple[Tensor, Tensor]:
    """Base and gain that include the first s knots, s = 0, 1, …, for x beyond these: (heads, knots + 1) each."""
    return base[:, None] - F.pad(running_sum(bend * knot), (1, 0)), gain[:, None] + F.pad(running_sum(bend), (1, 0))


def hinge_gradients(sums: Tensor, knot: Tensor, bend: Tensor, constant_matters: bool) -> dict[str, Tensor]:
    """Gradients of base, gain, bend and knot from a kernel's sums over tiles, (heads, 4, knots + 1).

    With g the gradient of a score and p the number of knots below the range of x in a tile, the sums are Σ g and Σ g·x
    by p; and, for the knots s inside the range only, Σ g·max(x − knot_s, 0) and Σ g·[x > knot_s]. If a constant that is
    added to all logits does not matter, the sum for it is rounding error.
    """
    plain, times_x, above, passed = sums.double().unbind(1)  # (heads, knots + 1) each
    # From the tiles that lie beyond a knot entirely.
    later_plain, later_x = (running_sum(x.flip(1)).flip(1)[:, 1:] for x in (plain, times_x))
    return {
        "base": plain.sum(1) if constant_matters else torch.zeros_like(plain[:, 0]),
        "gain": times_x.sum(1),
        "bend": above[:, :-1] + later_x - knot * later_plain,
        "knot": -(bend * (passed[:, :-1] + later_plain)).sum(0),
    }


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
