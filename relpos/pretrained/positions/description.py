"""What is known of the position in one attention layer of a model."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """The rotation of queries and keys in one layer, as they reach attention.

    Dimensions `start` to `start + rotated` of a head are rotated in pairs: with the layout "halves", pair m is
    (m, m + rotated / 2); with "pairs" it is (2m, 2m + 1). A pair (a, b) of the token at position i becomes

        factor · (a·cos(i·θ_m) − b·sin(i·θ_m),  a·sin(i·θ_m) + b·cos(i·θ_m)).
    """

    frequencies: Tensor  # θ: (rotated / 2,), radians per token, scaling applied; negative where a model turns backwards
    rotated: int
    head_dim: int
    layout: Literal["halves", "pairs"]
    factor: float = 1.0  # of cosines and sines: YaRN's and LongRoPE's attention factor
    scaling: Mapping[str, Any] = field(default_factory=dict)  # the model's own rope parameters
    start: int = 0  # the first rotated dimension; above 0 where a head ends with its rotated part

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate projected queries or keys as the model does.

        Args:
            x: (…, length, head_dim).
            positions: (length,), or what broadcasts to x without its last axis.

        Returns:
            The rotated ones, of the same shape.

        Example:
            >>> rotary = layer_positions(model)[0].rotary
            >>> rotary.apply(torch.randn(4, 10, rotary.head_dim), torch.arange(10))
        """
        return self._turn(x, positions, 1.0, self.factor)

    def undo(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate queries or keys back: the inverse of `apply`, with the same arguments."""
        return self._turn(x, positions, -1.0, 1.0 / self.factor)

    def _turn(self, x: Tensor, positions: Tensor, direction: float, factor: float) -> Tensor:
        if x.shape[-1] != self.head_dim:
            raise ValueError(f"the heads of this layer have {self.head_dim} dimensions, not {x.shape[-1]}.")
        exact = torch.promote_types(x.dtype, torch.float32)
        angle = direction * positions.to(exact)[..., None] * self.frequencies.to(x.device, exact)
        cos, sin = angle.cos() * factor, angle.sin() * factor
        end = self.start + self.rotated
        before, turning, after = x[..., : self.start], x[..., self.start : end], x[..., end:]
        pairs = self.rotated // 2
        shape = (2, pairs) if self.layout == "halves" else (pairs, 2)
        paired = turning.to(exact).reshape(*turning.shape[:-1], *shape)
        axis = -2 if self.layout == "halves" else -1
        a, b = paired.unbind(axis)
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=axis).flatten(-2).to(x.dtype)
        return torch.cat([before, turned, after], dim=-1)


@dataclass(frozen=True)
class LayerPosition:
    """Where position lives in one attention layer.

    `bias(length)` has one value per head and distance: (heads, 2·length − 1), at the distances i − j (query minus key)
    from −(length − 1) to length − 1. In causal layers only distances from 0 on occur; where the model adds a value per
    key (ALiBi), the constant per query, which changes no weight, is chosen so that distance 0 has 0. For "table 2-D",
    `bias(window)` is (heads, 2·window − 1, 2·window − 1): the differences of rows and of columns, query minus key, from
    −(window − 1) to window − 1.
    """

    name: str  # of the attention module, as in model.named_modules()
    kind: str  # "rotary", "learned", "sinusoidal", "buckets", "alibi", "deberta", "table 2-D", "none", "unknown"
    words: str  # one line
    rotary: Rotary | None = None
    table: Tensor | None = None  # (positions, width): added to the embedding; row 0 belongs to the first token
    bias: Callable[[int], Tensor] | None = None

    @property
    def title(self) -> str:
        """Its first words, as "RoPE" or "T5 buckets"."""
        return "unknown positions" if self.kind == "unknown" else re.split("[,:]", self.words)[0]

    @property
    def bias_by_distance(self) -> Callable[[int], Tensor] | None:
        """`bias`, if it is all that position does in this layer's scores, and a function of the distance alone."""
        return self.bias if self.kind in ("alibi", "buckets") else None
