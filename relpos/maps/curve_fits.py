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

A wave is a curve times e^(A cos ωd + B sin ωd).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.maps.distance_profiles import MassProfile

CURVES = ("constant", "exponential", "power", "logarithmic")
STEPS, CUTS = 60, 12  # of Newton's method: steps at most, and how often one is cut to a quarter
CLOSE = 1e-8  # it ends where the likelihood would gain less
RIDGE = 1e-10  # keeps its matrix invertible
LOGARITHMS = ("a", "c")  # parameters that are fitted by their logarithm
LARGEST = 60.0  # log f, and the logarithm of c, stay within ±60
LEAST = 1e-300  # in place of 0, where a logarithm is taken
SHORTEST = 3.0  # tokens of a period
PERIODS = 3  # that must lie within the distance that holds `HELD` of the mass
HELD = 0.9
LEAST_AMPLITUDE = 0.25  # of a wave whose frequency is worth refining
LEAST_SHARE = 0.2  # of the squared misfit of a curve that one frequency must explain for a wave to be fitted

Curve = Callable[[Tensor], tuple[Tensor, Tensor]]  # parameters (heads, n) to log f (heads, distances), its derivatives


@dataclass(frozen=True)
class RowSums:
    """Which distances each query i sees, and the weights f(d) / (s_i + F_i) that a kernel f over distances gives them.

    F_i is the sum of f over its keys, the first apart; s_i is 1 if it sees the first key or a learned sink.
    """

    length: int
    window: bool  # whether a query may see fewer keys before it than there are
    causal: bool
    before: Tensor  # (rows,): keys at the distances 0, 1, … that a query sees, the first key apart
    after: Tensor  # (rows,): keys after its own
    sees_sink: Tensor  # (rows,), 1 or 0

    def over_keys(self, f: Tensor) -> Tensor:
        """Σ of f(d) over the keys that each query sees: (…, distances) to (…, rows)."""
        running = F.pad(f.cumsum(dim=-1), (1, 0))
        before = running.index_select(-1, self.before) if self.window else running[..., :-1]
        return before if self.causal else before + (running.index_select(-1, self.after + 1) - f[..., :1])

    def over_rows(self, x: Tensor) -> Tensor:
        """Σ of x over the queries that see each distance, each side apart: (heads, rows) to (heads, distances)."""

        def beyond(ends: Tensor) -> Tensor:  # Σ of x over the rows with ends > d: (heads, distances)
            sums = x.new_zeros(len(x), self.length + 1).index_add_(1, ends, x)
            return sums.flip(-1).cumsum(dim=-1).flip(-1)[:, 1:]

        before = beyond(self.before)
        return before if self.causal else before + F.pad(beyond(self.after)[:, :-1], (1, 0))

    def weights(self, f: Tensor) -> Tensor:
        """1 / (s_i + F_i): (heads, rows); 0 for a query that sees nothing."""
        total = self.sees_sink + self.over_keys(f)
        return torch.where(total > 0, 1 / total.clamp(min=LEAST), 0.0)

    def mass(self, f: Tensor) -> Tensor:
        """The mass by distance, as a mean over queries: (heads, distances)."""
        return f * self.over_rows(self.weights(f)) / self.length

    def likelihood(self, f: Tensor, mass: Tensor) -> Tensor:
        """Log-likelihood of f if each query draws one key with the weights that add up to `mass`: (heads,)."""
        drawn = torch.where(mass > 0, mass * f.clamp(min=LEAST).log(), 0.0).sum(dim=-1) * self.length
        return drawn + self.weights(f).clamp(min=LEAST).log().sum(dim=-1)


def row_sums(profile: MassProfile) -> RowSums:
    """What the queries of a profile see."""
    i = torch.arange(profile.length)
    left, right = profile.window or (profile.length, profile.length)
    after = torch.zeros_like(i) if profile.causal else (profile.length - 1 - i).clamp(max=right)
    sees_sink = torch.ones_like(i) if profile.learned_sinks else (i <= left)
    return RowSums(
        profile.length, profile.window is not None, profile.causal, i.clamp(max=left + 1), after, sees_sink.double()
    )


@dataclass(frozen=True)
class Fit:
    """A curve fitted to each of some heads."""

    parameters: dict[str, Tensor]  # (heads,) each
    likelihood: Tensor  # (heads,)
    bic: Tensor  # (heads,)
    kernel: Tensor  # f, (heads, distances)
    mass: Tensor  # by distance, as the curve predicts it, (heads, distances)


def fit_curves(profile: MassProfile) -> dict[str, Fit]:
    """Fit all curves to the heads of a profile: one fit per name in `CURVES`."""
    d = torch.arange(profile.length, dtype=torch.float64)
    near = d.clamp(min=1)
    return {
        "constant": fit(profile, log_linear(d, []), ("a",)),
        "exponential": fit(profile, log_linear(d, [-d]), ("a", "b")),
        "power": fit(profile, log_linear(d, [-near.log()]), ("a", "b")),
        "logarithmic": fit(profile, _logarithmic(d), ("a", "c")),
    }


def log_linear(d: Tensor, features: Sequence[Tensor]) -> Curve:
    """log f(d) = log f(0) at 0 and log a + Σ_n θ_n x_n(d) beyond, with features x_n (distances,)."""

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

    For curves that are linear in log f the likelihood is concave. The first two parameters of a curve are log f(0) and
    log a; `names` are those of a and of what follows, and `more` counts further ones, for its BIC.
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


@dataclass(frozen=True)
class Wave:
    """A wave fitted to one head."""

    period: float  # tokens
    amplitude: float  # √(A² + B²): f is up to e^(2 · amplitude) times larger in a crest than in a trough
    fit: Fit  # of a single head


def fit_wave(profile: MassProfile, head: int, curve: str, fitted: Fit) -> Wave | None:
    """Fit a wave to a head (0 is the first), with the frequency that explains most of what its best curve leaves.

    None if no single frequency explains enough of it.
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
