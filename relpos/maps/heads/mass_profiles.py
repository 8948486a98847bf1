"""Where the attention of each head goes, by distance, as a mean over windows of text."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from relpos.attend.by_distance import mass_of_call
from relpos.forms.bias import Toeplitz, terms
from relpos.maps.layer import Layer


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
        """Number of heads."""
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
    return [int(d) if whole > 0 else None for d, whole in zip(first, total[:, 0], strict=True)]


@torch.no_grad()
def layer_mass(layer: Layer) -> MassProfile:
    """The attention mass of a layer on one input, exactly, in memory linear in the length.

    Args:
        layer: The layer.

    Returns:
        Its profile, with windows = 1.
    """
    # The layer's queries and keys are rotated already.
    mass = mass_of_call(layer.q, layer.k, layer.form, replace(layer.call, rotation=None))
    call = layer.call
    return MassProfile(
        layer.number,
        layer.length,
        call.causal,
        _window(layer),
        1,
        mass.distances.cpu(),
        mass.by_distance[0].double().cpu(),
        mass.first_key[0].double().cpu(),
        call.sinks is not None,
    )


def _window(layer: Layer) -> tuple[int, int] | None:
    """How far a query sees, before and after: by the window of the call, or by a bias of −inf beyond a distance."""
    before, after = layer.call.window or (layer.length, layer.length)
    for part in terms(layer.form):
        if isinstance(part, Toeplitz) and not bool(part.table.isfinite().all()):
            seen = part.table.isfinite().any(dim=0).nonzero()[:, 0] - part.zero  # distances
            before, after = min(before, int(seen.max())), min(after, max(0, -int(seen.min())))
    return None if min(before, after) >= layer.length - 1 else (before, after)


def mean_profile(profiles: Iterable[MassProfile]) -> MassProfile:
    """The mean over windows of one layer.

    Args:
        profiles: One per window, of the same layer and length.

    Returns:
        The profile of all windows.

    Raises:
        ValueError: There is none, or they are of different layers or lengths.

    Example:
        >>> mean_profile(layer_mass(layer) for layer in (first, second)).windows
        2
    """
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
    """Profiles of several layers as one, where their queries see the same keys.

    Args:
        profiles: One per layer.

    Returns:
        The places of some of the profiles, and a profile with all their heads, layer after layer; until all occurred.
    """
    groups: dict[object, list[int]] = {}
    for place, profile in enumerate(profiles):
        shape = (profile.length, profile.causal, profile.window, profile.windows, profile.learned_sinks)
        groups.setdefault(shape, []).append(place)
    for places in groups.values():
        by_distance, first_key = (
            torch.cat([getattr(profiles[place], name) for place in places]) for name in ("by_distance", "first_key")
        )
        yield places, replace(profiles[places[0]], by_distance=by_distance, first_key=first_key)
