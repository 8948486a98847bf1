"""RoPE: queries and keys turned by an angle that grows with their position."""

from collections.abc import Mapping

import torch
from torch import Tensor

from relpos.encodings.call import Call
from relpos.encodings.encoding import Encoding
from relpos.encodings.rope_scaling import rotation
from relpos.errors import unknown

LAYOUTS = ("half", "interleaved")


def turn(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Turn the pairs of x (batch, heads, length, head_dim); cos and sin (1 or batch, length, pairs).

    Pairs are dimensions k and k + pairs ("half") or 2k and 2k + 1 ("interleaved"); what is left over stays.
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
    """Rotary position embedding, with its scalings."""

    place = "query and key"
    form = "none"
    learns = "0"
    directions = "both"
    paper = "Su et al. 2021, arXiv 2104.09864"
    formula = "pair k of q_i and of k_i turned by the angle i·θ_k,  θ_k = base^(−2k/d)"
    options = {
        "base": "rope_theta; 10000 in the paper",
        "layout": "half: dimensions k and k + d/2 pair (Llama, NeoX); interleaved: 2k and 2k + 1 (paper, GPT-J, CABLE)",
        "fraction": "share of the head's dimensions that turn",
        "scaling": "default, linear, ntk, dynamic, yarn, llama3, longrope or proportional",
        "factor": "of the scaling; unless given 1, or the stretch over the original length (yarn, longrope)",
        "length": "trained length, for the scalings that ask for it",
        "rope_parameters": "transformers' dictionary, over all of the above",
    }

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        base: float = 10000.0,
        layout: str = "half",
        fraction: float = 1.0,
        scaling: str = "default",
        factor: float | None = None,
        length: int = 2048,
        rope_parameters: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(heads, head_dim)
        if layout not in LAYOUTS:
            raise unknown("layout", layout, LAYOUTS)
        self.layout = layout
        given = {"base": base, "fraction": fraction, "scaling": scaling, "factor": factor, "length": length}
        self.rotation = rotation(head_dim, given, rope_parameters)

    @property
    def depends_on_length(self) -> bool:
        return self.rotation.depends_on_length

    def rotate(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        theta = self.rotation.frequencies(call.lengths, call.dtype)
        angle = call.positions[..., None].to(call.dtype) * theta  # (1 or batch, keys, pairs)
        cos, sin = angle.cos() * self.rotation.amplitude, angle.sin() * self.rotation.amplitude
        last = call.keys - call.queries
        return turn(q, cos[:, last:], sin[:, last:], self.layout), turn(k, cos, sin, self.layout)
