"""Waves in the attention of heads by distance: a curve times e^(A cos ωd + B sin ωd)."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from relpos.maps.heads.curve_fits import Fit, fit, log_linear
from relpos.maps.heads.mass_profiles import MassProfile

SHORTEST = 3.0  # tokens of a period
PERIODS = 3  # that must lie within the distance that holds `HELD` of the mass
HELD = 0.9
LEAST_AMPLITUDE = 0.25  # of a wave whose frequency is worth refining
LEAST_SHARE = 0.2  # of the squared misfit of a curve that one frequency must explain for a wave to be fitted


@dataclass(frozen=True)
class Wave:
    """A wave fitted to one head."""

    period: float  # tokens
    amplitude: float  # √(A² + B²): f is up to e^(2 · amplitude) times larger in a crest than in a trough
    fit: Fit  # of a single head


def fit_wave(profile: MassProfile, head: int, curve: str, fitted: Fit) -> Wave | None:
    """Fit a wave to a head, with the frequency that explains most of what a curve leaves.

    Args:
        profile: The mass by distance.
        head: The head; 0 is the first.
        curve: Name of its best curve.
        fitted: The fits of that curve.

    Returns:
        The wave; None if the curve leaves nothing that one frequency explains.
    """
    mass, expected = profile.folded[head], fitted.mass[head]
    omega = _strongest(mass, expected, _reach(mass))
    if omega is None:
        return None
    alone = replace(
        profile, by_distance=profile.by_distance[head : head + 1], first_key=profile.first_key[head : head + 1]
    )
    d = torch.arange(profile.length, dtype=torch.float64)
    trend = -d if curve == "exponential" else -d.clamp(min=1).log()

    def at(frequency: float) -> Fit:
        waves = [(frequency * d).cos(), (frequency * d).sin()]
        return fit(alone, log_linear(d, [trend, *waves]), ("a", "b", "A", "B"), more=1)

    best, step = at(omega), math.pi / profile.length
    rounds = 7 if _amplitude(best) > LEAST_AMPLITUDE else 0
    for _ in range(rounds):  # the transform's frequency is that of the mass, whose trend shifts it, not of log f
        for near in (omega - step, omega + step):
            tried = at(near)
            if tried.likelihood > best.likelihood:
                best, omega = tried, near
        step /= 2
    return Wave(2 * math.pi / omega, _amplitude(best), best)


def _amplitude(fitted: Fit) -> float:
    return math.hypot(float(fitted.parameters["A"][0]), float(fitted.parameters["B"][0]))


def _reach(mass: Tensor) -> int:
    """The distance that holds most of a head's mass."""
    running = mass.cumsum(dim=0)
    return int((running >= HELD * running[-1]).to(torch.int64).argmax())


def _strongest(mass: Tensor, expected: Tensor, reach: int) -> float | None:
    """The frequency (radians per token) that explains most of mass − expected, if that is enough."""
    length = len(mass)
    left = mass - expected
    left[0] = 0.0  # the token itself has a value of its own
    misfit = float((left.square() / expected.clamp(min=1e-12)).sum())
    lowest, highest = 2 * math.pi * PERIODS / max(reach, 1), 2 * math.pi / SHORTEST
    if misfit <= 0 or lowest >= highest:
        return None
    size = 4 * length
    power = torch.fft.rfft(left, size).abs().square() * 2 / float(expected.sum())
    omega = torch.arange(len(power), dtype=torch.float64) * 2 * math.pi / size
    power = torch.where((omega >= lowest) & (omega <= highest), power, 0.0)
    best = int(power.argmax())
    return float(omega[best]) if float(power[best]) >= LEAST_SHARE * misfit else None
