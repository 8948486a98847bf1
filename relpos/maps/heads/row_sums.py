"""Attention that is a function of the distance alone: sums over the keys of each query and over queries."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos.maps.heads.mass_profiles import MassProfile

LEAST = 1e-300  # in place of 0, where a logarithm is taken


@dataclass(frozen=True)
class RowSums:
    """Which distances each query sees, and the weights that a kernel f over distances gives them.

    A query at index i gives a key at distance d the weight f(d) / (s_i + F_i), where F_i is the sum of f over all keys
    that it sees, the first apart, and s_i is 1 if it sees the first key or a learned sink, else 0.
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
