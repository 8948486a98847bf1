"""A rotation of queries and keys, as tables of cosines and sines."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """The cosines and sines by which pairs of dimensions of each query and key are rotated.

    They may hold factors as well: xPos stretches queries and shrinks keys. The first 2·pairs dimensions of a head are
    rotated, the rest stays.

    Attributes:
        q_cos: Cosines for the queries, (1 or batch, queries, pairs).
        q_sin: Sines for the queries.
        k_cos: Cosines for the keys, (1 or batch, keys, pairs).
        k_sin: Sines for the keys.
        layout: Pair p has the dimensions p and p + pairs ("half"), or 2p and 2p + 1 ("interleaved").
    """

    q_cos: Tensor  # (1 or batch, queries, pairs)
    q_sin: Tensor
    k_cos: Tensor  # (1 or batch, keys, pairs)
    k_sin: Tensor
    layout: str  # pair p has the dimensions p and p + pairs ("half"), or 2p and 2p + 1 ("interleaved")

    def apply(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries (batch, heads, queries, head_dim) and keys (batch, key_heads, keys, head_dim)."""
        return turn(q, self.q_cos, self.q_sin, self.layout), turn(k, self.k_cos, self.k_sin, self.layout)


def turn(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rotate pairs of dimensions of queries or keys.

    Args:
        x: Queries or keys, (batch, heads, length, head_dim).
        cos: Cosines of the angles, (1 or batch, length, pairs).
        sin: Sines of the angles, (1 or batch, length, pairs).
        layout: Which dimensions form pair p: p and p + pairs ("half"), or 2p and 2p + 1 ("interleaved").

    Returns:
        x with its first 2·pairs dimensions rotated and the rest unchanged.
    """
    return turn_pairs(x, cos[:, None], sin[:, None], layout)


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """The same for any x (…, head_dim), with cosines and sines (…, pairs) that broadcast to its other axes."""
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if layout == "half":
        a, b = turned.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
    a, b = turned[..., 0::2], turned[..., 1::2]
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([turned, rest], dim=-1)
