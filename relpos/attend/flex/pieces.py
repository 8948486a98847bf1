"""A network with one hidden ReLU layer and a scalar input, as a table of its linear pieces.

f_h(x) = Σ_u out[h, u] · relu(slope[u] · x + shift[u]) + offset[h]
       = base[h, s] + gain[h, s] · (x − centre[s])       in piece s, the number of edges below x

A unit changes its sign at its edge −shift / slope. Each piece is written around a centre in its own range, so that
nothing cancels. Computed in float64: there are only as many values as units.
"""

import torch
from torch import Tensor

from relpos.attend.hinges import value_range
from relpos.forms.bias import Scaled


def pieces(form: Scaled) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The pieces of the form's function, float32. Gradients of slope, shift, out and offset flow through the last two.

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
