import torch
from torch import Tensor

from relpos.forms.checks import positive_number
from relpos.forms.encoding import Encoding


class Sinusoidal(Encoding):
    """Sinusoidal absolute positions: fixed sines and cosines, added to the token embedding.

    Args:
        amplitude: Factor a of the sines and cosines; the CABLE authors use 0.1.
        base: Base of the wavelengths; 10000 in the paper.
    """

    paper = "Vaswani et al. 2017, arXiv 1706.03762"
    formula = "x_i ← x_i + a·p_i,  p_i[2k] = sin(i / 10000^(2k/width)),  p_i[2k + 1] = cos(i / 10000^(2k/width))"

    def __init__(
        self, heads: int, head_dim: int, *, amplitude: float = 1.0, base: float = 10000.0, width: int | None = None
    ) -> None:
        super().__init__(heads, head_dim, width)
        if self.width % 2:
            raise ValueError(f"sinusoidal pairs the dimensions, so the width must be even, not {self.width}.")
        self.amplitude, self.base = positive_number("amplitude", amplitude), positive_number("base", base)

    def embed(self, x: Tensor, start: int = 0, documents: Tensor | None = None) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        positions = self.positions_of(x, start, documents).to(dtype)  # (1 or batch, length)
        k = torch.arange(0, self.width, 2, dtype=dtype, device=x.device)  # (width / 2,)
        angle = positions[..., None] * self.base ** (-k / self.width)  # (1 or batch, length, width / 2)
        waves = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)  # (1 or batch, length, width)
        return x + (self.amplitude * waves).to(x.dtype)
