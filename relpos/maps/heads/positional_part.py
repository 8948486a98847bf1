"""The positional part of attention scores alone. The formulas: docs/positional-part.md.

mean_scores       the mean score at each distance over real text, with its standard deviation
rotation_kernel   what the rotation of RoPE does to the mean query and the mean key, by frequency
equal_tokens      a model's layers for an input whose tokens are all equal, so that only their positions differ
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from relpos.attend.arguments import RotaryFrequencies
from relpos.forms.rotation import turn
from relpos.maps.diagonals import Diagonals
from relpos.maps.head_values import all_heads
from relpos.maps.layer import Layer
from relpos.maps.map import NUMBERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ScoreProfile:
    """The scores of the heads of one layer by distance: mean and standard deviation, without the first key."""

    layer: int
    windows: int  # of text
    distances: Tensor  # (distances,), query − key
    mean: Tensor  # (heads, distances) in float64, NaN where no query sees a key
    deviation: Tensor  # (heads, distances)


@torch.no_grad()
def layer_scores(layer: Layer) -> ScoreProfile:
    """The mean score at each distance, s̄(d) = mean over i of s(i, i − d), in memory linear in the length.

    A score is scaled, rotated, with the softcap and the bias, before the softmax. The first key is left out, as in the
    mass by distance: where it is a sink, its score has little to do with its distance.

    Args:
        layer: The layer on one input.

    Returns:
        Mean and standard deviation over all pairs, with windows = 1.
    """
    heads = all_heads(layer, "scores")
    parts = [Diagonals(1, layer.length, layer.causal) for _ in heads]
    for first, end in heads[0].row_blocks(NUMBERS):
        for head, part in zip(heads, parts, strict=True):
            values = head.block(first, end, 0, end if layer.causal else layer.length).double()
            values[:, 0] = torch.nan
            part.add(values[None], first)
    diagonals = Diagonals.joined(parts)
    distances = torch.arange(0 if layer.causal else 1 - layer.length, layer.length)
    return ScoreProfile(layer.number, 1, distances, diagonals.mean, diagonals.variance.sqrt())


def mean_scores(profiles: Sequence[ScoreProfile]) -> ScoreProfile:
    """The profile of several windows of the same length: each has as many pairs at a distance as the others."""
    count = sum(profile.windows for profile in profiles)
    mean = sum(profile.windows / count * profile.mean for profile in profiles)
    square = sum(p.windows / count * (p.mean.square() + p.deviation.square()) for p in profiles)
    assert isinstance(mean, Tensor)
    assert isinstance(square, Tensor)
    deviation = (square - mean.square()).clamp(min=0).sqrt()
    return replace(profiles[0], windows=count, mean=mean, deviation=deviation)


@dataclass(frozen=True)
class TokenMeans:
    """The mean query and the mean key of each head before the rotation, without the first token."""

    layer: int
    q: Tensor  # (heads, head_dim) in float64, times the scale of the scores
    k: Tensor  # (heads, head_dim)
    turned: RotaryFrequencies


@dataclass(frozen=True)
class RotationKernel:
    """The expected score of a query and a key that are drawn independently, by distance d:

    kernel(d) = constant + Σ_m amplitude_m · cos(frequency_m · d + phase_m)
    """

    layer: int
    frequencies: Tensor  # (bands,), radians per token
    amplitude: Tensor  # (heads, bands), in units of the scores
    phase: Tensor  # (heads, bands), radians
    constant: Tensor  # (heads,), of the dimensions that are not rotated

    def bands(self, distances: Tensor) -> Tensor:
        """The term of each frequency, at distances (n,): (heads, bands, n)."""
        angle = self.frequencies[:, None] * distances.double()  # (bands, n)
        return self.amplitude[:, :, None] * (angle + self.phase[:, :, None]).cos()

    def total(self, distances: Tensor) -> Tensor:
        """The kernel at distances (n,): (heads, n)."""
        return self.constant[:, None] + self.bands(distances).sum(dim=1)

    @property
    def wavelengths(self) -> Tensor:
        """Tokens per turn of each frequency: (bands,)."""
        return 2 * torch.pi / self.frequencies


@torch.no_grad()
def token_means(layer: Layer) -> TokenMeans:
    """The mean query and key of a layer on one input.

    Raises:
        ValueError: The layer does not rotate queries and keys by frequencies.
    """
    if layer.turned is None:
        raise ValueError(f"layer {layer.number} does not rotate queries and keys by frequencies.")
    q, k = (_unrotated(x, layer)[0, :, 1:].mean(dim=1) for x in (layer.q, layer.k))
    k = k.repeat_interleave(layer.heads // len(k), dim=0)
    return TokenMeans(layer.number, q * layer.call.scale, k, layer.turned)


def rotation_kernel(means: Sequence[TokenMeans]) -> RotationKernel:
    """What the rotation alone does: the expected score at each distance, with content averaged out.

    Of pair m let q_m and k_m be complex numbers, before the rotation. A query at i and a key at i − d have the score
    scale · Σ_m Re(q̄_m k_m e^(−i ω_m d)), and for independent ones E[q̄_m k_m] is the product of the means, c_m. So
    the amplitude is scale · |c_m|, and the phase is −arg c_m.

    Args:
        means: Of one layer, one per window of text.

    Returns:
        The kernel, before any softcap.
    """
    q, k = (torch.stack([getattr(window, name) for window in means]).mean(dim=0) for name in ("q", "k"))
    turned = means[0].turned
    pairs = len(turned.frequencies)
    product = _complex(q, pairs, turned.layout).conj() * _complex(k, pairs, turned.layout)
    rest = (q[:, 2 * pairs :] * k[:, 2 * pairs :]).sum(dim=-1)
    return RotationKernel(means[0].layer, turned.frequencies.double().cpu(), product.abs(), -product.angle(), rest)


def _unrotated(x: Tensor, layer: Layer) -> Tensor:
    """Queries or keys (1, heads, length, head_dim) before the rotation, in float64. Factors of the rotation stay."""
    assert layer.turned is not None
    positions = layer.call.key_positions[:1].double().cpu()
    angle = positions[..., None] * layer.turned.frequencies.double().cpu()  # (1, length, pairs)
    return turn(x.double().cpu(), angle.cos(), -angle.sin(), layer.turned.layout)


def _complex(x: Tensor, pairs: int, layout: str) -> Tensor:
    """The pairs of vectors (heads, head_dim) as complex numbers: (heads, pairs)."""
    turned = x[:, : 2 * pairs]
    real, imaginary = turned.chunk(2, dim=-1) if layout == "half" else (turned[:, 0::2], turned[:, 1::2])
    return torch.complex(real, imaginary)


@torch.no_grad()
def equal_tokens(model: "PreTrainedModel", layers: Callable[[], list[Layer]]) -> list[Layer]:
    """The position–position term of the scores: layers of a model whose tokens differ in their positions only.

    The embedding of every token is replaced by the mean over the tokens of the input. In each layer the mean over
    positions is subtracted from queries and keys, so that the scores of the result are scale · δq_i·δk_j.

    Args:
        model: A model with learned or sinusoidal positions.
        layers: Runs the model on an input and returns its layers.

    Returns:
        The layers, without bias and softcap.
    """

    def averaged(module: object, arguments: object, out: Tensor) -> Tensor:
        return out.mean(dim=(0, 1), keepdim=True).expand_as(out)

    hook = model.get_input_embeddings().register_forward_hook(averaged)
    try:
        return [_differences(layer) for layer in layers()]
    finally:
        hook.remove()


def _differences(layer: Layer) -> Layer:
    q, k = (x - x.mean(dim=2, keepdim=True) for x in (layer.q, layer.k))
    return replace(layer, q=q, k=k, form=None, reads_scores=False, call=replace(layer.call, softcap=None))
