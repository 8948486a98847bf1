"""A bias, scores or attention weights that someone already has: checked, and as the values of heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from relpos.maps.heads.mass_profiles import MassProfile
from relpos.maps.layer import Quantity
from relpos.maps.values import HeadValues, TensorValues
from relpos.system.errors import unknown

SHAPES = "(heads, tokens, tokens) or (layers, heads, tokens, tokens)"


@dataclass(frozen=True)
class TensorLayers:
    """The values of the heads of some layers, and the names of their tokens."""

    layers: list[list[HeadValues]]
    show: Quantity
    tokens: list[str] | None

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.layers[0][0].length

    @property
    def causal(self) -> bool:
        """Whether no query sees a key after its own, in any head."""
        return all(head.causal for heads in self.layers for head in heads)


def is_tensor(what: object) -> bool:
    """Whether something is a tensor or an array, or a list of them, one per layer."""
    if isinstance(what, list | tuple):
        return bool(what) and all(isinstance(layer, Tensor | np.ndarray) for layer in what)
    return isinstance(what, Tensor | np.ndarray)


def open_tensor(what: Any, show: str | None, tokens: Sequence[str] | None) -> TensorLayers:
    """Check a tensor.

    Args:
        what: (heads, tokens, tokens) or (layers, heads, tokens, tokens), rows are queries; or one tensor per layer, as
            the `attentions` of transformers, where each may have a batch of one. NaN and −inf: not seen.
        show: What it holds: bias, scores or weights.
        tokens: Names of the tokens.

    Raises:
        ValueError: The shape is another, nothing in a head is finite, or `show` or `tokens` do not fit.
        TypeError: The values are not numbers.
    """
    if show is None:
        raise ValueError("say what the tensor holds: show='bias', show='scores' or show='weights'.")
    if show not in get_args(Quantity):
        raise unknown("kind of values of a tensor", show, get_args(Quantity))
    values = _stacked(what)
    if values.dim() == 3:
        values = values[None]
    if values.dim() != 4 or 0 in values.shape or values.shape[-1] != values.shape[-2]:
        raise ValueError(f"a tensor of the shape {tuple(values.shape)} cannot be drawn: give {SHAPES}.")
    if tokens is not None and len(tokens) != values.shape[-1]:
        raise ValueError(f"there are {len(tokens)} names for {values.shape[-1]} tokens: give one name per token.")
    empty = (~values.isfinite().flatten(2).any(dim=2)).nonzero()
    if len(empty):
        layer, head = (empty[0] + 1).tolist()
        raise ValueError(f"head {head} of layer {layer} has no finite value: there is nothing to show.")
    layers: list[list[HeadValues]] = [[TensorValues(head) for head in heads] for heads in values]
    return TensorLayers(layers, show, None if tokens is None else [str(token) for token in tokens])  # type: ignore[arg-type]


def _stacked(what: Any) -> Tensor:
    """One tensor on the CPU, in float32 at least; layers with a batch of one are stacked."""
    if isinstance(what, list | tuple):
        layers = [_stacked(layer) for layer in what]
        layers = [layer[0] if layer.dim() == 4 and len(layer) == 1 else layer for layer in layers]
        if len({layer.shape for layer in layers}) > 1 or layers[0].dim() != 3:
            shapes = sorted({tuple(layer.shape) for layer in layers})
            raise ValueError(
                f"layers of the shapes {shapes} cannot be drawn together: give the same (heads, tokens, tokens) each."
            )
        return torch.stack(layers)
    if isinstance(what, np.ndarray) and what.dtype.kind not in "fiub":
        raise TypeError(f"an array of {what.dtype} holds no numbers that can be drawn: give {SHAPES}.")
    values = torch.as_tensor(what).detach().cpu()
    if values.is_complex():
        raise TypeError(f"a tensor of {values.dtype} cannot be drawn: give real numbers.")
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def tensor_mass(heads: Sequence[HeadValues], number: int) -> MassProfile:
    """The mass of attention weights by distance, as a mean over queries; the first key apart."""
    length, causal = heads[0].length, all(head.causal for head in heads)
    by_distance, first_key = [], []
    for head in heads:
        weights = head.block(0, length, 0, length).double().nan_to_num(0.0, 0.0, 0.0)
        first_key.append(weights[:, 0].mean())
        weights[:, 0] = 0.0
        sums = [weights.diagonal(-d).sum() for d in range(0 if causal else 1 - length, length)]
        by_distance.append(torch.stack(sums) / length)
    distances = torch.arange(0 if causal else 1 - length, length)
    return MassProfile(number, length, causal, None, 1, distances, torch.stack(by_distance), torch.stack(first_key))


def mean_entropy(head: HeadValues) -> float:
    """The mean entropy of the rows of attention weights, in nats."""
    weights = head.block(0, head.length, 0, head.length).double().nan_to_num(0.0, 0.0, 0.0)
    return float(torch.special.entr(weights.clamp(min=0)).sum(dim=1).mean())
