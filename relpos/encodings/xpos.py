"""xPos: RoPE with a decay, so that distant pairs of tokens count less."""

import torch
from torch import Tensor

from relpos.encodings.call import Call
from relpos.encodings.checks import positive_number
from relpos.encodings.encoding import Encoding
from relpos.encodings.rope import turn


class Xpos(Encoding):
    """xPos: RoPE with a decay, so that distant pairs of tokens count less.

    Args:
        heads: Number of attention heads.
        head_dim: Size of a head, even.
        base: Base of the wavelengths; 10000 in the paper.
        scale_base: Distance over which the decay acts; 512 in the paper, larger values decay more slowly.
    """

    paper = "Sun et al. 2023, arXiv 2212.10554"
    formula = (
        "pair k rotated as in rope (interleaved), q_i × ζ_k^(i/512), k_j ÷ ζ_k^(j/512),  ζ_k = (2k + 0.4d) / (1.4d)"
    )

    def __init__(self, heads: int, head_dim: int, *, base: float = 10000.0, scale_base: float = 512.0) -> None:
        super().__init__(heads, head_dim)
        if head_dim % 2:
            raise ValueError(f"xpos rotates pairs of dimensions, so head_dim must be even, not {head_dim}.")
        self.base, self.scale_base = positive_number("base", base), positive_number("scale_base", scale_base)

    @property
    def bidirectional(self) -> bool:
        return False

    def rotate(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        d = self.head_dim
        even = torch.arange(0, d, 2, device=call.device, dtype=call.dtype)  # 2k: (pairs,)
        position = call.positions[..., None].to(call.dtype)  # (1 or batch, keys, 1)
        angle = position * self.base ** (-even / d)  # (1 or batch, keys, pairs)
        # Only differences of positions matter. Counted from the middle, the powers stay in range for twice the length.
        middle = (call.lengths[..., None] // 2).to(call.dtype)
        scale = ((even + 0.4 * d) / (1.4 * d)) ** ((position - middle) / self.scale_base)
        last = call.keys - call.queries
        cos, sin = angle.cos(), angle.sin()
        q = turn(q, (cos * scale)[:, last:], (sin * scale)[:, last:], "interleaved")
        return q, turn(k, cos / scale, sin / scale, "interleaved")
