import torch
from torch import Tensor

from relpos.forms.call import Call
from relpos.forms.checks import positive_number
from relpos.forms.encoding import Encoding
from relpos.forms.rotation import Rotation


class Xpos(Encoding):
    """xPos: RoPE with a decay, so that distant pairs of tokens count less.

    Args:
        base: Base of the wavelengths; 10000 in the paper.
        scale_base: Distance over which the decay acts; 512 in the paper, larger values decay more slowly.
    """

    paper = "Sun et al. 2023, arXiv 2212.10554"
    formula = (
        "pair k of q_i and of k_i rotated by the angle i·θ_k,  θ_k = base^(−2k/d),  q_i[k] ← ζ_k^(i/512)·q_i[k],  "
        "k_j[k] ← ζ_k^(−j/512)·k_j[k],  ζ_k = (2k + 0.4d) / (1.4d);  pairs are interleaved; 512 is scale_base"
    )

    bidirectional = False
    alternatives = ("rope",)

    def __init__(self, heads: int, head_dim: int, *, base: float = 10000.0, scale_base: float = 512.0) -> None:
        super().__init__(heads, head_dim)
        if head_dim % 2:
            raise ValueError(f"xpos rotates pairs of dimensions, so head_dim must be even, not {head_dim}.")
        self.base, self.scale_base = positive_number("base", base), positive_number("scale_base", scale_base)

    def rotation(self, call: Call) -> Rotation:
        d = self.head_dim
        even = torch.arange(0, d, 2, device=call.device, dtype=call.dtype)  # 2k: (pairs,)
        zeta = (even + 0.4 * d) / (1.4 * d)

        # Only differences of positions matter. Counted from the middle, the powers stay in range for twice the length.
        def waves(positions: Tensor, lengths: Tensor, sign: int) -> tuple[Tensor, Tensor]:
            position = positions[..., None].to(call.dtype)  # (1 or batch, tokens, 1)
            middle = (lengths[..., None] // 2).to(call.dtype)
            angle = position * self.base ** (-even / d)  # (1 or batch, tokens, pairs)
            stretch = zeta ** (sign * (position - middle) / self.scale_base)
            return angle.cos() * stretch, angle.sin() * stretch

        q_cos, q_sin = waves(call.query_positions, call.query_lengths, 1)
        k_cos, k_sin = waves(call.key_positions, call.key_lengths, -1)
        return Rotation(q_cos, q_sin, k_cos, k_sin, "interleaved")
