"""RoPE: queries and keys rotated by an angle that grows with their position."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from relpos.encodings.call import Call
from relpos.encodings.encoding import Encoding
from relpos.encodings.rope_scaling import Scaling, rotation


def turn(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rotate pairs of dimensions.

    Args:
        x: Queries or keys, (batch, heads, length, head_dim).
        cos: Cosines of the angles, (1 or batch, length, pairs).
        sin: Sines of the angles, (1 or batch, length, pairs).
        layout: Which dimensions form pair k: k and k + pairs ("half"), or 2k and 2k + 1 ("interleaved").

    Returns:
        x with its first 2·pairs dimensions rotated and the rest unchanged.
    """
    pairs = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]  # (1 or batch, 1, length, pairs)
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if layout == "half":
        a, b = turned.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
    a, b = turned[..., 0::2], turned[..., 1::2]
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([turned, rest], dim=-1)


class Rope(Encoding):
    """RoPE: queries and keys rotated by their position, with the scalings for longer inputs.

    Args:
        heads: Number of attention heads.
        head_dim: Size of a head.
        base: Base of the wavelengths, `rope_theta` in transformers; 10000 in the paper.
        layout: Which dimensions form a pair. "half": k and k + d/2 (Llama, NeoX); "interleaved": 2k and 2k + 1 (paper,
            GPT-J, CABLE).
        fraction: Share of the head's dimensions that are rotated.
        scaling: Scaling of the frequencies, named as in transformers.
        factor: Factor of the scaling; if None, 1, or for yarn and longrope the length over the original length.
        length: Trained length, for the scalings that depend on it.
        rope_parameters: The dictionary of a transformers configuration; its entries override all of the above.
    """

    paper = "Su et al. 2021, arXiv 2104.09864"
    formula = "pair k of q_i and of k_i rotated by the angle i·θ_k,  θ_k = base^(−2k/d)"

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        base: float = 10000.0,
        layout: Literal["half", "interleaved"] = "half",
        fraction: float = 1.0,
        scaling: Scaling = "default",
        factor: float | None = None,
        length: int = 2048,
        rope_parameters: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(heads, head_dim)
        self.layout = layout
        numbers = {"base": base, "fraction": fraction, "scaling": scaling, "factor": factor, "length": length}
        self.rotation = rotation(head_dim, numbers, rope_parameters)

    @property
    def depends_on_length(self) -> bool:
        return self.rotation.depends_on_length

    def rotate(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        theta = self.rotation.frequencies(call.lengths, call.dtype)
        angle = call.positions[..., None].to(call.dtype) * theta  # (1 or batch, keys, pairs)
        cos, sin = angle.cos() * self.rotation.amplitude, angle.sin() * self.rotation.amplitude
        last = call.keys - call.queries
        return turn(q, cos[:, last:], sin[:, last:], self.layout), turn(k, cos, sin, self.layout)
