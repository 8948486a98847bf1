"""Curves fitted to the attention of heads by distance, by maximum likelihood.

The model of a head is a kernel f over distances: a query gives the key at distance d the weight f(d) / (1 + F), where F
is the sum of f over all keys that it sees, the first apart, and 1 is the weight of the first key (the sink). So each
query's weights add up to 1, and a distance that few queries see, or that they see among many keys, is judged by what
they could have given it. If each query draws one key with its weights, the log-likelihood of f is

    L(f) = windows · (length · Σ_d mass_d log f(d) − Σ_i log(1 + F_i))

and the mass by distance is a sufficient statistic. BIC = parameters · log(windows · length) − 2 L.

The token itself, d = 0, has a value of its own in every curve. From d = 1 on:

    constant      f(d) = a
    exponential   f(d) = a e^(−b d)
    power         f(d) = a d^(−b)
    logarithmic   f(d) = a (1 − (1 − c) log d / log D),  D the largest distance: a at 1, a·c at D
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relpos.maps.heads.mass_profiles import MassProfile
from relpos.maps.heads.row_sums import RowSums, row_sums

CURVES = ("constant", "exponential", "power", "logarithmic")
STEPS, CUTS = 60, 12  # of Newton's method: steps at most, and how often one is cut to a quarter
CLOSE = 1e-8  # it ends where the likelihood would gain less
RIDGE = 1e-10  # keeps its matrix invertible
LOGARITHMS = ("a", "c")  # parameters that are fitted by their logarithm
LARGEST = 60.0  # log f, and the logarithm of c, stay within ±60

Curve = Callable[[Tensor], tuple[Tensor, Tensor]]  # parameters (heads, n) to log f (heads, distances), its derivatives


@dataclass(frozen=True)
class Fit:
    """A curve fitted to each of some heads."""

    parameters: dict[str, Tensor]  # (heads,) each
    likelihood: Tensor  # (heads,)
    bic: Tensor  # (heads,)
    kernel: Tensor  # f, (heads, distances)
    mass: Tensor  # by distance, as the curve predicts it, (heads, distances)


def fit_curves(profile: MassProfile) -> dict[str, Fit]:
    """Fit all curves to the heads of a profile.

    Args:
        profile: The mass by distance of one layer, or of several of the same shape as `stacked` gives it.

    Returns:
        One fit per name in `CURVES`.

    Example:
        >>> fits = fit_curves(layer_mass(layer))
        >>> min(fits, key=lambda name: float(fits[name].bic[0]))  # the best curve of the first head
        'power'
    """
    d = torch.arange(profile.length, dtype=torch.float64)
    near = d.clamp(min=1)
    return {
        "constant": fit(profile, log_linear(d, []), ("a",)),
        "exponential": fit(profile, log_linear(d, [-d]), ("a", "b")),
        "power": fit(profile, log_linear(d, [-near.log()]), ("a", "b")),
        "logarithmic": fit(profile, _logarithmic(d), ("a", "c")),
    }


def log_linear(d: Tensor, features: Sequence[Tensor]) -> Curve:
    """log f(d) = log f(0) at 0 and log a + Σ_n θ_n x_n(d) beyond.

    Args:
        d: The distances, (distances,).
        features: x_n, (distances,) each.
    """

    def curve(theta: Tensor) -> tuple[Tensor, Tensor]:
        design = _design(d, features, len(theta))
        return (theta.T[:, :, None] * design).sum(dim=0), design

    return curve


def _logarithmic(d: Tensor) -> Curve:
    """f(d) = a ((1 − u) + c u), u = log d / log D, with log c as the third parameter."""
    u = d.clamp(min=1).log() / max(math.log(len(d)), 1e-12)

    def curve(theta: Tensor) -> tuple[Tensor, Tensor]:
        c = theta[:, 2:].clamp(-LARGEST, LARGEST).exp()
        line = (1 - u) + c * u  # (heads, distances)
        design = _design(d, [c * u / line], len(theta))
        return theta[:, :1] * design[0] + theta[:, 1:2] * design[1] + line.log() * design[1], design

    return curve


def _design(d: Tensor, features: Sequence[Tensor], heads: int) -> Tensor:
    """The columns of a curve: the token itself, what lies beyond it, and the features there: (n, heads, distances)."""
    own, beyond = (d == 0).double(), (d > 0).double()
    return torch.stack(
        [(x * beyond).expand(heads, -1) if n else own.expand(heads, -1) for n, x in enumerate([own, beyond, *features])]
    )


def fit(profile: MassProfile, curve: Curve, names: Sequence[str], more: int = 0) -> Fit:
    """Fit a curve by Newton's method with the expected curvature, halving steps until the likelihood does not fall.

    For curves that are linear in log f the likelihood is concave.

    Args:
        profile: The mass by distance.
        curve: The curve; its first two parameters are log f(0) and log a.
        names: Names of a and of the parameters after it.
        more: Parameters that the curve has besides, for its BIC.

    Returns:
        The fit of every head.
    """
    sums, mass = row_sums(profile), profile.folded
    theta = torch.zeros(profile.heads, len(names) + 1, dtype=torch.float64)
    sink = profile.sink.clamp(1e-6, 1 - 1e-6)
    theta[:, :2] = ((1 - sink) / sink / profile.length).log()[:, None]  # a start from the sink's share
    likelihood = sums.likelihood(_kernel(curve, theta), mass)
    moving = torch.arange(profile.heads)  # heads whose fit has not ended
    for _ in range(STEPS):
        step, gain = _newton_step(sums, curve, theta[moving], mass[moving])
        moving, step = moving[gain > CLOSE], step[gain > CLOSE]
        for _ in range(CUTS):
            tried = sums.likelihood(_kernel(curve, theta[moving] + step), mass[moving])
            rises = tried > likelihood[moving]
            if bool(rises.all()):
                break
            step[~rises] /= 4
        moving, step = moving[rises], step[rises]
        if len(moving) == 0:
            break
        theta[moving] += step
        likelihood[moving] = tried[rises]
    f = _kernel(curve, theta)
    likelihood = likelihood * profile.windows
    bic = (theta.shape[1] + more) * math.log(profile.windows * profile.length) - 2 * likelihood
    values = {name: theta[:, n].exp() if name in LOGARITHMS else theta[:, n] for n, name in enumerate(names, 1)}
    return Fit(values, likelihood, bic, f, sums.mass(f))


def _newton_step(sums: RowSums, curve: Curve, theta: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """The step (heads, n), and how much the likelihood would gain by it, to first order: (heads,)."""
    log_f, design = curve(theta)
    f = log_f.clamp(-LARGEST, LARGEST).exp()
    weights = sums.weights(f)
    expected = f * sums.over_rows(weights)  # (heads, distances)
    gradient = ((sums.length * mass - expected) * design).sum(dim=-1).T
    means = sums.over_keys(f * design) * weights  # of the columns under each query's weights: (n, heads, rows)
    curvature = _products(expected * design, design) - _products(means, means)
    size = curvature.diagonal(dim1=1, dim2=2).clamp(min=1e-30).sqrt()  # columns may differ by orders of magnitude
    scaled = curvature / (size[:, :, None] * size[:, None, :])
    eye = torch.eye(theta.shape[1], dtype=torch.float64)
    step: Tensor = torch.linalg.solve(scaled + RIDGE * eye, gradient / size) / size
    change = (step.T[:, :, None] * design).sum(dim=0).abs().amax(dim=1)
    step = step * (LARGEST / change.clamp(min=LARGEST))[:, None]
    return step, (gradient * step).sum(dim=1)


def _products(x: Tensor, y: Tensor) -> Tensor:
    """Sums over the last axis of all products of a row of x (n, heads, …) and one of y: (heads, n, n)."""
    return torch.stack([(row * y).sum(dim=-1) for row in x]).permute(2, 0, 1)


def _kernel(curve: Curve, theta: Tensor) -> Tensor:
    return curve(theta)[0].clamp(-LARGEST, LARGEST).exp()
