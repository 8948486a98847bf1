"""The class of each head, from its attention mass by distance, with a fitted curve and its half-distance.

The rules, in this order; shares are of the mass without the sink, and `misfit` is the total variation distance between
the head's mass and that of a fitted curve: the share of the mass that would have to move.

    sink             at least ¾ of all attention goes to the first token (or to a learned sink)
    previous token   at least ½ of the rest is at distance 1
    next token       at least ½ of it is at distance −1 (in both directions)
    flat             misfit ≤ 0.15 from attention that is equal for all keys
    periodic         a wave times a curve halves the misfit of the best curve, has a lower BIC, crests at least four
                     times as high as troughs, and three periods within the distance that holds 90 % of the mass
    decaying         misfit ≤ ⅓ from the best curve, which falls at least to a half between distance 1 and the largest
    other            the rest
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from relpos.maps.curve_fits import CURVES, Fit, Wave, fit_curves, fit_wave, row_sums
from relpos.maps.distance_profiles import MassProfile, half_distances, stacked
from relpos.maps.values import check_time, one_thread

Kind = Literal["previous token", "next token", "decaying", "flat", "periodic", "sink", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SINK, NEIGHBOUR, FLAT, MISFIT = 0.75, 0.5, 0.15, 1 / 3
CREST = math.log(4.0)  # of the largest over the smallest value of a wave
LEAST_OF_WAVE = 0.15  # misfit of a curve below which no wave with such crests is missing
LEAST_LENGTH = 8  # tokens; shorter profiles have no shape


@dataclass(frozen=True)
class HeadClass:
    """The class of a head and the numbers behind it."""

    head: int  # 1 is the first
    kind: Kind
    sink: float  # share of all attention
    previous: float  # share of the rest at distance 1
    half_distance: int | None  # within which half of the rest lies
    curve: str  # that fits best
    parameters: dict[str, float]
    fitted_half_distance: int | None  # of the mass that the curve predicts
    misfit: float  # of that curve
    bic: dict[str, float]  # of all curves
    period: float | None  # tokens, of a periodic head
    fitted_mass: Tensor = field(repr=False, compare=False)  # by absolute distance, as the curve predicts it

    def as_json(self) -> dict[str, Any]:
        """The numbers, ready for `json.dumps`; without the predicted mass."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "fitted_mass"}


def class_heads(profiles: Sequence[MassProfile]) -> list[list[HeadClass]]:
    """The class of each head of some layers, from the mass by distance of each layer."""
    for profile in profiles:
        if profile.length < LEAST_LENGTH:
            raise ValueError(
                f"{profile.length} tokens are too few to class heads by distance: give a length of at least "
                f"{LEAST_LENGTH}."
            )
    classes: list[list[HeadClass]] = [[] for _ in profiles]
    with one_thread():
        for places, together in stacked(profiles):  # layers of one shape are fitted together
            heads = iter(_class_together(together))
            for place in places:
                classes[place] = [replace(next(heads), head=head + 1) for head in range(profiles[place].heads)]
    return classes


def _class_together(profile: MassProfile) -> list[HeadClass]:
    fits = fit_curves(profile)
    mass = profile.folded
    misfits = {name: _misfit(mass, fits[name].mass) for name in CURVES}
    best = torch.stack([fits[name].bic for name in CURVES]).argmin(dim=0)
    even = fits["constant"].kernel.clone()
    even[:, 0] = even[:, 1]  # equal weight also for the token itself
    from_even = _misfit(mass, row_sums(profile).mass(even))
    halves, total = half_distances(mass), mass.sum(dim=1).clamp(min=1e-300)
    zero = int((profile.distances == 0).nonzero()[0])
    neighbours = profile.by_distance[:, [zero + 1, zero - 1 if zero else zero]] / total[:, None]
    classes = []
    for head in range(profile.heads):
        check_time()
        curve = CURVES[int(best[head])]
        chosen, misfit = fits[curve], float(misfits[curve][head])
        previous, following = (float(share) for share in neighbours[head])
        wave = None
        kind: Kind
        if profile.sink[head] >= SINK:
            kind = "sink"
        elif previous >= NEIGHBOUR:
            kind = "previous token"
        elif zero and following >= NEIGHBOUR:
            kind = "next token"
        elif from_even[head] <= FLAT:
            kind = "flat"
        elif misfit > LEAST_OF_WAVE and _periodic(
            mass[head], wave := fit_wave(profile, head, curve, chosen), misfit, float(chosen.bic[head])
        ):
            kind = "periodic"
        else:
            kind = "decaying" if misfit <= MISFIT and _falls(chosen, head) else "other"
        classes.append(
            HeadClass(
                head + 1,
                kind,
                float(profile.sink[head]),
                previous,
                halves[head],
                curve,
                {name: float(values[head]) for name, values in chosen.parameters.items()},
                half_distances(chosen.mass[head : head + 1])[0],
                misfit,
                {name: float(fits[name].bic[head]) for name in CURVES},
                wave.period if kind == "periodic" and wave is not None else None,
                chosen.mass[head] if kind != "periodic" or wave is None else wave.fit.mass[0],
            )
        )
    return classes


def _misfit(mass: Tensor, expected: Tensor) -> Tensor:
    """Total variation distance between two masses (…, distances), each divided by its sum: (…,)."""
    measured, predicted = (x / x.sum(dim=-1, keepdim=True).clamp(min=1e-300) for x in (mass, expected))
    return (measured - predicted).abs().sum(dim=-1) / 2


def _falls(fitted: Fit, head: int) -> bool:
    return bool(fitted.kernel[head, -1] <= fitted.kernel[head, 1] / 2)


def _periodic(mass: Tensor, wave: Wave | None, misfit: float, bic: float) -> bool:
    if wave is None or 2 * wave.amplitude < CREST or float(wave.fit.bic[0]) >= bic:
        return False
    return float(_misfit(mass, wave.fit.mass[0])) <= misfit / 2
