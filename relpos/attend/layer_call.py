"""What one attention layer of a model was asked to do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from relpos.forms.encoding import Encoding


@dataclass(frozen=True)
class RotaryFrequencies:
    """How queries and keys are rotated: by so many radians per token in each pair of dimensions."""

    frequencies: Tensor  # (pairs,); dimensions from 2 · pairs on are not rotated
    layout: str  # which dimensions form pair m: m and m + pairs ("half"), or 2m and 2m + 1 ("interleaved")


@dataclass(frozen=True)
class LayerCall:
    """The queries and keys of one attention layer on one input, and how it attends."""

    q: Tensor  # (1, heads, length, head_dim)
    k: Tensor  # (1, key_heads, length, head_dim)
    position: Encoding | None  # acts on them; None if nothing is left to do, as for keys that come rotated
    arguments: Mapping[str, Any]  # further ones of `relpos.attention`: hidden, causal, window, scale, …
    turned: RotaryFrequencies | None = None  # how q and k were rotated before, if that is known
