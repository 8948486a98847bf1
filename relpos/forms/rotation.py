"""Rotations of queries and keys: tables of cosines and sines, and the frequencies of RoPE under its scalings.

The scalings are named and keyed as in transformers' `rope_parameters`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from relpos.forms.checks import integer_at_least, positive_number
from relpos.system.errors import unknown

SectionOrder = Literal["blocks", "interleaved"]
Scaling = Literal["default", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope", "proportional"]


@dataclass(frozen=True)
class Rotation:
    """The cosines and sines by which pairs of dimensions of each query and key are rotated.

    They may hold factors as well: xPos stretches queries and shrinks keys. The first 2·pairs dimensions of a head are
    rotated, the rest stays.

    Attributes:
        q_cos: Cosines for the queries, (1 or batch, queries, pairs).
        q_sin: Sines for the queries.
        k_cos: Cosines for the keys, (1 or batch, keys, pairs).
        k_sin: Sines for the keys.
        layout: Pair p has the dimensions p and p + pairs ("half"), or 2p and 2p + 1 ("interleaved").
    """

    q_cos: Tensor
    q_sin: Tensor
    k_cos: Tensor
    k_sin: Tensor
    layout: str

    def apply(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries (batch, heads, queries, head_dim) and keys (batch, key_heads, keys, head_dim)."""
        return turn(q, self.q_cos, self.q_sin, self.layout), turn(k, self.k_cos, self.k_sin, self.layout)


def turn(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rotate queries or keys (batch, heads, length, head_dim) by angles (1 or batch, length, pairs)."""
    return turn_pairs(x, cos[:, None], sin[:, None], layout)


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """The same for any x (…, head_dim), with cosines and sines (…, pairs) that broadcast to its other axes."""
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if layout == "half":
        a, b = turned.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
    a, b = turned[..., 0::2], turned[..., 1::2]
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([turned, rest], dim=-1)


@dataclass(frozen=True)
class RopeParameters:
    """The parameters of RoPE with any scaling; the comments are the names in transformers."""

    head_dim: int
    base: float = 10000.0  # rope_theta
    fraction: float = 1.0  # partial_rotary_factor
    scaling: Scaling = "default"  # rope_type
    factor: float = 1.0
    length: int = 2048  # max_position_embeddings
    trained: int = 2048  # original_max_position_embeddings
    attention_factor: float | None = None
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    short_factor: Sequence[float] = ()  # longrope
    long_factor: Sequence[float] = ()
    sections: Sequence[int] | None = None  # mrope_section
    section_order: SectionOrder = "blocks"  # mrope_interleaved

    @property
    def dim(self) -> int:
        """Dimensions of the head that are rotated."""
        return self.head_dim if self.scaling == "proportional" else int(self.head_dim * self.fraction)

    def frequencies(self, lengths: Tensor, dtype: torch.dtype) -> Tensor:
        """θ of each pair, (pairs,); or (1 or batch, length, pairs) where they depend on the lengths of documents.

        The lengths are those of the documents of tokens, (1 or batch, length). The arithmetic runs in the order in
        which the checkpoints were trained.
        """
        base: float | Tensor = self.base
        if self.scaling == "ntk":  # the slowest pair is stretched by the factor, the fastest not at all
            base = base * self.factor ** (self.dim / (self.dim - 2))
        elif self.scaling == "dynamic":  # NTK with a factor that grows beyond the trained length
            grown = lengths.clamp(min=self.length).to(dtype)[..., None]  # (1 or batch, length, 1)
            base = base * ((self.factor * grown / self.length) - (self.factor - 1)) ** (self.dim / (self.dim - 2))
        exponents = torch.arange(0, self.dim, 2, device=lengths.device).to(dtype) / self.dim
        return SCALINGS[self.scaling](self, 1.0 / torch.pow(base, exponents), lengths)

    @property
    def axes(self) -> int:
        """Axes of the positions: 1, or one per section."""
        return 1 if self.sections is None else len(self.sections)

    @property
    def axis_of_pair(self) -> list[int]:
        """The axis whose position rotates each pair: (pairs,)."""
        pairs, sections = range(self.dim // 2), self.sections or [self.dim // 2]
        if self.section_order == "blocks":
            return [axis for axis, size in enumerate(sections) for _ in range(size)]
        # The axes take turns, until each but the first has its number of pairs; the first has the rest.
        return [pair % self.axes if pair // self.axes < sections[pair % self.axes] else 0 for pair in pairs]

    @property
    def amplitude(self) -> float:
        """Factor of the cosines and sines."""
        if self.scaling not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.scaling == "yarn":
            if self.mscale and self.mscale_all_dim:
                return _yarn_amplitude(self.factor, self.mscale) / _yarn_amplitude(self.factor, self.mscale_all_dim)
            return _yarn_amplitude(self.factor)
        return math.sqrt(1 + math.log(self.factor) / math.log(self.trained)) if self.factor > 1 else 1.0


def _unchanged(r: RopeParameters, theta: Tensor, lengths: Tensor) -> Tensor:
    """θ_k = base^(−2k/d), with the base of the scaling."""
    return theta


def _linear(r: RopeParameters, theta: Tensor, lengths: Tensor) -> Tensor:
    """Positions divided by the factor."""
    return theta / r.factor


def _yarn(r: RopeParameters, theta: Tensor, lengths: Tensor) -> Tensor:
    """Fast pairs unchanged, slow pairs interpolated, a linear ramp between."""

    def pair_turning(turns: float) -> float:  # the pair that makes this many turns over the trained length
        return (r.dim * math.log(r.trained / (turns * 2 * math.pi))) / (2 * math.log(r.base))

    low, high = pair_turning(r.beta_fast), pair_turning(r.beta_slow)
    if r.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, r.dim - 1)
    if low == high:
        high += 0.001
    pair = torch.arange(r.dim // 2, device=theta.device, dtype=theta.dtype)
    keep = 1 - ((pair - low) / (high - low)).clamp(0, 1)
    return theta / r.factor * (1 - keep) + theta * keep


def _llama3(r: RopeParameters, theta: Tensor, lengths: Tensor) -> Tensor:
    """Long waves stretched by the factor, short waves unchanged, a linear ramp between."""
    wavelength = 2 * math.pi / theta
    ramp = (r.trained / wavelength - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor)
    between = (1 - ramp) * (theta / r.factor) + ramp * theta
    long, short = r.trained / r.low_freq_factor, r.trained / r.high_freq_factor
    return torch.where(wavelength > long, theta / r.factor, torch.where(wavelength < short, theta, between))


def _longrope(r: RopeParameters, theta: Tensor, lengths: Tensor) -> Tensor:
    """One factor per pair from a search: one list up to the trained length, another beyond."""
    short, long = theta.new_tensor(r.short_factor), theta.new_tensor(r.long_factor)
    return theta / torch.where((lengths > r.trained)[..., None], long, short)  # (1 or batch, length, pairs)


def _proportional(r: RopeParameters, theta: Tensor, lengths: Tensor) -> Tensor:
    """p-RoPE: only the fastest pairs are rotated, at the frequencies of the full head."""
    turning = torch.arange(len(theta), device=theta.device) < int(r.fraction * r.head_dim // 2)
    return torch.where(turning, theta, 0.0) / r.factor


SCALINGS: dict[Scaling, Callable[[RopeParameters, Tensor, Tensor], Tensor]] = {
    "default": _unchanged,
    "linear": _linear,
    "ntk": _unchanged,
    "dynamic": _unchanged,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
}
_OURS = {  # transformers' keys that have another name here
    "rope_theta": "base",
    "partial_rotary_factor": "fraction",
    "rope_type": "scaling",
    "type": "scaling",
    "original_max_position_embeddings": "trained",
    "max_position_embeddings": "length",
    "mrope_section": "sections",
}
_KEYS = {
    *_OURS,
    "mrope_interleaved",
    *(set(RopeParameters.__dataclass_fields__) - {"head_dim", "section_order", *_OURS.values()}),
}


def read_parameters(
    head_dim: int, options: Mapping[str, object], rope_parameters: Mapping[str, object] | None
) -> RopeParameters:
    """The parameters of a RoPE, checked: its options, overridden by a dictionary of transformers."""
    numbers = dict(options)
    for key, value in (rope_parameters or {}).items():
        if key not in _KEYS:
            raise unknown("key of rope_parameters", key, _KEYS)
        if key == "mrope_interleaved":
            numbers["section_order"] = "interleaved" if value else "blocks"
        elif value is not None:
            numbers[_OURS.get(key, key)] = "default" if value == "mrope" else value  # Qwen2-VL's name of the type
    if numbers.get("scaling") not in SCALINGS:
        raise unknown("RoPE scaling", numbers.get("scaling"), SCALINGS)
    numbers.setdefault("trained", numbers["length"])
    if numbers["factor"] is None:  # DeepSeek-V3 and Phi-3 mean the stretch over the original length
        stretched = numbers["scaling"] in ("yarn", "longrope")
        numbers["factor"] = numbers["length"] / numbers["trained"] if stretched else 1.0  # type: ignore[operator]
    r = RopeParameters(head_dim=head_dim, **numbers)  # type: ignore[arg-type]
    _check(r)
    return r


def _check(r: RopeParameters) -> None:
    """Refuse parameters that are out of range."""
    numbers = [
        *("base", "fraction", "factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
        *(name for name in ("attention_factor", "mscale", "mscale_all_dim") if getattr(r, name) is not None),
    ]
    for name in numbers:
        positive_number(name, getattr(r, name))
    for value in (*r.short_factor, *r.long_factor):
        positive_number("each number of short_factor and long_factor", value)
    integer_at_least("length", r.length)
    integer_at_least("original_max_position_embeddings", r.trained, least=2 if r.scaling == "longrope" else 1)
    if r.base <= 1:
        raise ValueError(f"base must be over 1, because with 1 all pairs have the same frequency, not {r.base!r}.")
    if r.fraction > 1:
        raise ValueError(f"fraction must be over 0 and at most 1, not {r.fraction!r}.")
    if r.dim % 2 or r.dim < 2:
        raise ValueError(f"rope rotates pairs of dimensions: {r.dim} of head_dim {r.head_dim} cannot be paired.")
    if r.scaling in ("ntk", "dynamic") and r.dim < 4:
        raise ValueError(f"the scaling {r.scaling!r} needs at least 4 rotated dimensions, not {r.dim}.")
    if r.scaling == "llama3" and r.high_freq_factor <= r.low_freq_factor:
        raise ValueError(f"high_freq_factor ({r.high_freq_factor}) must be over low_freq_factor ({r.low_freq_factor}).")
    if r.scaling == "longrope" and not len(r.short_factor) == len(r.long_factor) == r.dim // 2:
        raise ValueError(
            f"longrope needs short_factor and long_factor of {r.dim // 2} numbers each, "
            f"not {len(r.short_factor)} and {len(r.long_factor)}."
        )
    if r.sections is not None:
        _check_sections(r, r.sections)


def _check_sections(r: RopeParameters, sections: Sequence[int]) -> None:
    """Refuse sections that do not divide the pairs."""
    pairs = r.dim // 2
    if isinstance(sections, str) or not isinstance(sections, Sequence) or len(sections) < 2:
        raise ValueError(f"sections must be the number of pairs for each of 2 or more axes, not {sections!r}.")
    for size in sections:
        integer_at_least("each of the sections", size, least=0)
    if sum(sections) != pairs:
        raise ValueError(
            f"sections must add up to the {pairs} pairs that are rotated, not to {sum(sections)}: {list(sections)}."
        )
    counts = [r.axis_of_pair.count(axis) for axis in range(len(sections))]
    if counts != list(sections):
        raise ValueError(f"the sections {list(sections)} cannot be interleaved: the axes would get {counts} pairs.")


def _yarn_amplitude(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
