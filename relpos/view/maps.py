"""The numbers behind a picture."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from relpos.attend import scores
from relpos.encodings.registry import encoding


@dataclass(frozen=True)
class Maps:
    """One map a head, and what it shows."""

    values: NDArray[np.float32]  # (heads, length, length), −inf where a key is not seen
    caption: str


@torch.no_grad()
def untrained(name: str, heads: int, head_dim: int, length: int, seed: int, options: Mapping[str, object]) -> Maps:
    """The maps of an encoding at its start.

    One that reads its input gets a random one: hidden, queries and keys of N(0, 1). One that adds no bias shows the
    scores it makes of tokens that differ in nothing but their position.
    """
    torch.manual_seed(seed)
    position = encoding(name, heads, head_dim, **options)
    options_told = "".join(f", {key}={value}" for key, value in options.items())
    told = f"({heads} heads of {head_dim}{options_told})"
    start = f"{name}, untrained" if any(True for _ in position.parameters()) else name
    if position.place in ("embedding", "query and key"):
        same = torch.randn(1, 1, heads * head_dim).expand(1, length, -1)
        if position.place == "embedding":
            same = position.embed(torch.zeros(1, length, position.width))
        token = same.reshape(1, length, heads, -1).transpose(1, 2)  # (1, heads, length, head_dim)
        return Maps(scores(token, token, position)[0].numpy(), f"{start}: scores of equal tokens {told}")
    hidden = torch.randn(1, length, position.width) if position.needs_hidden else None
    q, k = torch.randn(2, 1, heads, length, head_dim) if position.needs_scores else (None, None)
    values = position.map(length, hidden=hidden, q=q, k=k)
    if values.dim() == 3:
        return Maps(values.numpy(), f"{start}: the bias {told}")
    return Maps(values[0].numpy(), f"{start}: the bias for a random input {told}")
