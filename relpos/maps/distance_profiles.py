"""Attention and scores of each head by distance, as means over windows of text. Formulas: docs/positional-part.md.

layer_mass        where the attention goes
layer_scores      the mean score at each distance, with its standard deviation
rotation_kernel   what the rotation of RoPE does to the mean query and the mean key, by frequency
equal_tokens      a model's layers for an input whose tokens are all equal, so that only their positions differ
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from relpos.attend.arguments import RotaryFrequencies
from relpos.attend.by_distance import mass_of_call
from relpos.forms.bias import Toeplitz, terms
from relpos.forms.rotation import turn
from relpos.maps.diagonals import Diagonals
from relpos.maps.head_values import all_heads
from relpos.maps.layer import Layer
from relpos.maps.map import NUMBERS
from relpos.maps.values import HeadValues

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MassProfile:
    """The attention of the heads of one layer by distance: shares of all attention, a mean over queries and windows."""

    layer: int  # 1 is the first layer
    length: int
    causal: bool
    window: tuple[int, int] | None  # how many tokens before and after its own a query sees
    windows: int  # of text, over which the mean is taken
    distances: Tensor  # (distances,), query − key
    by_distance: Tensor  # (heads, distances) in float64, without the first token
    first_key: Tensor  # (heads,), the share of the first token
    learned_sinks: bool = False  # whether each softmax has one more logit, which carries no value

    @property
    def heads(self) -> int:
        return len(self.by_distance)

    @property
    def sink(self) -> Tensor:
        """The share that goes to the first token and to learned sinks: (heads,)."""
        return (1 - self.by_distance.sum(dim=1)).clamp(0, 1)

    @property
    def folded(self) -> Tensor:
        """The mass by the absolute distance: (heads, length)."""
        zero = int((self.distances == 0).nonzero()[0])
        forward = self.by_distance[:, zero:].clone()
        forward[:, 1 : zero + 1] += self.by_distance[:, :zero].flip(-1)
        return forward

    @property
    def half_distance(self) -> list[int | None]:
        """The distance within which half of each head's attention lies, the sink apart; None if it has no other."""
        return half_distances(self.folded)


def half_distances(mass: Tensor) -> list[int | None]:
    """The smallest distance d with Σ_{e ≤ d} mass_e ≥ ½ Σ mass, per head of (heads, distances); None if all is 0."""
    running = mass.cumsum(dim=1)
    total = running[:, -1:]
    first = (running >= total / 2 * (1 - 1e-9)).to(torch.int64).argmax(dim=1)  # rounding must not skip an exact half
    return [int(d) if mass > 0 else None for d, mass in zip(first, total[:, 0], strict=True)]


@torch.no_grad()
def layer_mass(layer: Layer) -> MassProfile:
    """The attention mass of a layer on one input, exactly, in memory linear in the length."""
    call = replace(layer.call, rotation=None)  # the layer's queries and keys are rotated already
    mass = mass_of_call(layer.q.contiguous(), layer.k.contiguous(), layer.form, call)
    by_distance, first_key = (x[0].double().cpu() for x in (mass.by_distance, mass.first_key))
    sizes = (layer.number, layer.length, call.causal, _window(layer), 1)
    return MassProfile(*sizes, mass.distances.cpu(), by_distance, first_key, call.sinks is not None)


def _window(layer: Layer) -> tuple[int, int] | None:
    """How far a query sees, before and after: by the window of the call, or by a bias of −inf beyond a distance."""
    before, after = layer.call.window or (layer.length, layer.length)
    for part in terms(layer.form):
        if isinstance(part, Toeplitz) and not bool(part.table.isfinite().all()):
            seen = part.table.isfinite().any(dim=0).nonzero()[:, 0] - part.zero  # distances
            before, after = min(before, int(seen.max())), min(after, max(0, -int(seen.min())))
    return None if min(before, after) >= layer.length - 1 else (before, after)


def flat_mass(layer: Layer) -> MassProfile:
    """The mass of equal content under a causal bias by distance: mass(d) = e^b(d) · Σ_{i ≥ d} 1 / Z_i / length."""
    values = layer.values_by_distance("bias")  # (heads, length)
    values = torch.where(values.isfinite(), values, -torch.inf)
    lse = values.logcumsumexp(dim=1)  # log Z_i
    after = (-lse).flip(1).logcumsumexp(dim=1).flip(1)  # log Σ_{i ≥ d} 1 / Z_i
    first = (values - lse).exp()  # of key 0: at distance i of query i
    by_distance = ((values + after).exp() / layer.length - first / layer.length).clamp(min=0)
    sizes = (layer.number, layer.length, True, _window(layer), 1)
    return MassProfile(*sizes, torch.arange(layer.length), by_distance, first.sum(dim=1) / layer.length)


@torch.no_grad()
def mass_of_weights(heads: Sequence[HeadValues], number: int) -> MassProfile:
    """The mass of attention weights that exist already."""
    length, diagonals = heads[0].length, diagonals_without_first_key(heads)
    by_distance = (diagonals.mean.nan_to_num() * diagonals.count) / length
    first_key = [float(head.block(0, length, 0, 1).double().nansum()) / length for head in heads]
    sizes = (number, length, diagonals.causal, None, 1)
    return MassProfile(*sizes, _distances(diagonals), by_distance, torch.tensor(first_key, dtype=torch.float64))


def mean_profile(profiles: Iterable[MassProfile]) -> MassProfile:
    """The mean over windows of one layer and length."""
    listed = list(profiles)
    if not listed:
        raise ValueError("there is no profile to average: give at least one window of text.")
    first = listed[0]
    if any((other.layer, other.length) != (first.layer, first.length) for other in listed):
        kinds = sorted({f"layer {other.layer} with {other.length} tokens" for other in listed})
        raise ValueError(f"these are profiles of {', '.join(kinds)}: give windows of one length, of one layer.")
    count = sum(profile.windows for profile in listed)
    by_distance, first_key = (
        torch.stack([getattr(profile, name) * profile.windows for profile in listed]).sum(dim=0) / count
        for name in ("by_distance", "first_key")
    )
    return replace(first, windows=count, by_distance=by_distance, first_key=first_key)


def stacked(profiles: Sequence[MassProfile]) -> Iterator[tuple[list[int], MassProfile]]:
    """Profiles of several layers as one, where their queries see the same keys: their places, and all their heads."""
    groups: dict[object, list[int]] = {}
    for place, profile in enumerate(profiles):
        shape = (profile.length, profile.causal, profile.window, profile.windows, profile.learned_sinks)
        groups.setdefault(shape, []).append(place)
    for places in groups.values():
        by_distance, first_key = (
            torch.cat([getattr(profiles[place], name) for place in places]) for name in ("by_distance", "first_key")
        )
        yield places, replace(profiles[places[0]], by_distance=by_distance, first_key=first_key)


def diagonals_without_first_key(heads: Sequence[HeadValues]) -> Diagonals:
    """Statistics by distance of all keys but the first: where it is a sink, its score has little to do with it."""
    length, causal = heads[0].length, all(head.causal for head in heads)
    parts = [Diagonals(1, length, causal) for _ in heads]
    for first, end in heads[0].row_blocks(NUMBERS):
        for head, part in zip(heads, parts, strict=True):
            values = head.block(first, end, 0, end if causal else length).double()
            values[:, 0] = torch.nan
            part.add(values[None], first)
    return Diagonals.joined(parts)


def _distances(diagonals: Diagonals) -> Tensor:
    return torch.arange(-diagonals.zero, diagonals.length)


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

    A score is scaled, rotated, with the softcap and the bias, before the softmax.
    """
    diagonals = diagonals_without_first_key(all_heads(layer, "scores"))
    return ScoreProfile(layer.number, 1, _distances(diagonals), diagonals.mean, diagonals.variance.sqrt())


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
    """The mean query and key of a layer on one input, before the rotation; its factors stay."""
    if layer.turned is None:
        raise ValueError(f"layer {layer.number} does not rotate queries and keys by frequencies.")
    positions = layer.call.key_positions[:1].double().cpu()
    angle = positions[..., None] * layer.turned.frequencies.double().cpu()  # (1, length, pairs)
    q, k = (
        turn(x.double().cpu(), angle.cos(), -angle.sin(), layer.turned.layout)[0, :, 1:].mean(dim=1)
        for x in (layer.q, layer.k)
    )
    k = k.repeat_interleave(layer.heads // len(k), dim=0)
    return TokenMeans(layer.number, q * layer.call.scale, k, layer.turned)


def rotation_kernel(means: Sequence[TokenMeans]) -> RotationKernel:
    """What the rotation alone does, before any softcap; `means` are of one layer, one per window of text.

    Of pair m let q_m and k_m be complex numbers, before the rotation. A query at i and a key at i − d have the score
    scale · Σ_m Re(q̄_m k_m e^(−i ω_m d)), and for independent ones E[q̄_m k_m] is the product of the means, c_m. So
    the amplitude is scale · |c_m|, and the phase is −arg c_m.
    """
    q, k = (torch.stack([getattr(window, name) for window in means]).mean(dim=0) for name in ("q", "k"))
    turned = means[0].turned
    pairs = len(turned.frequencies)
    product = _complex(q, pairs, turned.layout).conj() * _complex(k, pairs, turned.layout)
    rest = (q[:, 2 * pairs :] * k[:, 2 * pairs :]).sum(dim=-1)
    return RotationKernel(means[0].layer, turned.frequencies.double().cpu(), product.abs(), -product.angle(), rest)


def _complex(x: Tensor, pairs: int, layout: str) -> Tensor:
    """The pairs of vectors (heads, head_dim) as complex numbers: (heads, pairs)."""
    turned = x[:, : 2 * pairs]
    real, imaginary = turned.chunk(2, dim=-1) if layout == "half" else (turned[:, 0::2], turned[:, 1::2])
    return torch.complex(real, imaginary)


@torch.no_grad()
def equal_tokens(model: "PreTrainedModel", layers: Callable[[], list[Layer]]) -> list[Layer]:
    """The position–position term of the scores: layers of a model whose tokens differ in their positions only.

    The embedding of every token is replaced by the mean over the tokens of the input, on which `layers` runs the model.
    In each layer the mean over positions is subtracted from queries and keys, so that the scores of the result, which
    has no bias and no softcap, are scale · δq_i·δk_j.
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
