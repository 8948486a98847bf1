"""Rotations: how queries and keys are turned in each layer, measured where they reach attention.

One token is repeated, so that the content of all queries of a layer is the same and only their positions differ: the
query at position p must be the one at position 0, turned as the configuration says. Where a model takes positions, each
row of the batch has another one, up to thousands.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from relpos.checking.capture import AttentionCall
from relpos.checking.check_subject import (
    ABSOLUTE,
    LOW,
    ModelSubject,
    NotApplicableError,
    NotTestableError,
    Subject,
    as_model,
)
from relpos.checking.outcomes import Outcome, Test
from relpos.forms.rotation import read_parameters
from relpos.models.attention import SelfAttention
from relpos.pretrained.families.rotary import BACKWARDS, INTERLEAVED
from relpos.pretrained.layer_position import NORM_LAST, ModelLayer, Rotary
from relpos.pretrained.positions import layer_numbers

POSITIONS = (0, 1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 300, 513, 1025, 2047)
REPEATED = 3  # tokens of a row
LONG_TEXT = 320  # tokens in which our own models, which take no other positions, are looked at
CLOSE = 3e-3  # relative to the norm of a query: float32 angles at thousands of tokens are right to 1e-4
LOW_CLOSE = 0.06  # in bfloat16, whose queries themselves are right to 0.01
SAME_FACTOR = 5e-3


class Layer(Protocol):
    """What findings say of a layer."""

    @property
    def name(self) -> str: ...

    @property
    def index(self) -> int: ...

    @property
    def model_type(self) -> str: ...


@dataclass(frozen=True)
class NumberedLayer:
    """A layer of a port, of which its number is known."""

    index: int
    name: str
    model_type: str = ""


@dataclass(frozen=True)
class LayerRotation:
    """Queries and keys of one layer by position, and how the configuration says that they are turned."""

    layer: Layer
    expected: Rotary | None  # None: not at all
    positions: Tensor  # (positions,), the first is 0
    q: Tensor  # (positions, heads, head_dim), of one content
    k: Tensor
    factor: float | None  # of k after the rotation over before; None if it could not be measured
    close: float = CLOSE  # the error that counts as none

    def off(self, x: Tensor, rotary: Rotary | None, positions: Tensor | None = None) -> Tensor:
        """How far q or k is from what a rotation makes of its content, by position, relative to its norm."""
        still = x[:1]
        if rotary is None:
            turned = still.expand_as(x)
        else:
            places = (self.positions if positions is None else positions).to(x.dtype)[:, None]
            turned = rotary.apply(rotary.undo(still, torch.zeros_like(places[:1])).expand_as(x), places)
        off: Tensor = (x - turned).flatten(1).norm(dim=1) / still.norm()
        return off

    def explained(self, q: Rotary | None, k: Rotary | None, positions: Tensor | None = None) -> bool:
        """Whether these rotations are the ones that run."""
        worst = max(float(self.off(self.q, q, positions).max()), float(self.off(self.k, k, positions).max()))
        return worst <= self.close


def expected_rotary(layer: ModelLayer, described: Rotary, length: int) -> Rotary | None:
    """The rotation that a configuration asks for, computed from its parameters and not by the model's code."""
    if isinstance(layer.module, SelfAttention):  # of our own models, whose description is the configuration's
        return described
    config, module = layer.config, layer.module
    size = getattr(module, "qk_rope_head_dim", None) or described.head_dim
    parameters = {key: value for key, value in described.scaling.items() if key != "attn_factor"}
    numbers: dict[str, object] = {
        "base": 10_000.0,
        "fraction": 1.0,
        "scaling": "default",
        "factor": None,
        "length": int(getattr(config, "max_position_embeddings", None) or 2048),
        "sections": None,
        "section_order": "blocks",
    }
    rotary_dim = getattr(config, "rotary_dim", None)
    if isinstance(rotary_dim, int) and "partial_rotary_factor" not in parameters:
        numbers["fraction"] = rotary_dim / size
    known = {key: value for key, value in parameters.items() if key in TRANSFORMERS_KEYS}
    try:
        rope = read_parameters(size, numbers, known)
        frequencies = rope.frequencies(torch.full((1, 1), length), torch.float64).reshape(-1)
    except (ValueError, TypeError):
        return None
    if layer.model_type in BACKWARDS:
        frequencies = -frequencies
    layout = "interleaved" if layer.model_type in INTERLEAVED else "half"
    return replace(described, frequencies=frequencies, layout=layout, factor=rope.amplitude)


def unscaled(rotary: Rotary) -> Rotary:
    """The same rotation with the frequencies of its theta alone."""
    theta, pairs = float(rotary.scaling.get("rope_theta", 10_000.0)), len(rotary.frequencies)
    frequencies = theta ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    return replace(rotary, frequencies=frequencies * rotary.frequencies[0].sign())


TRANSFORMERS_KEYS = {
    *("rope_theta", "partial_rotary_factor", "rope_type", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
}


def measured(subject: ModelSubject) -> list[LayerRotation]:
    """The queries and keys of each rotary or NoPE layer at some positions, in the dtype that the model has now."""
    dtype = next(subject.model.parameters()).dtype
    if dtype not in subject.rotations:
        subject.rotations[dtype] = _measured(subject)
    return subject.rotations[dtype]


def _measured(subject: ModelSubject) -> list[LayerRotation]:
    if "rotary" not in subject.kinds:
        if "unknown" in subject.kinds or not subject.kinds:
            kind = subject.model.config.model_type
            raise NotTestableError(f"relpos does not read the rotation of models of type {kind!r}")
        raise NotApplicableError
    positions = choose_positions(subject)
    calls, constant = repeated_token(subject, positions, subject.positions, subject.tokens(1, 1, 0))
    length = int(positions.max()) + 1
    rotations = []
    for layer in subject.layers:
        position = subject.known[layer.name]
        if layer.name not in calls or position.kind not in ("rotary", "none") or not constant.get(layer.name, False):
            continue
        q, k, projections = calls[layer.name]
        expected = None
        if position.rotary is not None:
            expected = expected_rotary(layer, position.rotary, length)
            if expected is None or q.shape[-1] != expected.head_dim:
                continue
        factor = None if layer.model_type in NORM_LAST else factor_of(k, projections, expected)
        low = next(subject.model.parameters()).dtype in LOW
        rotations.append(LayerRotation(layer, expected, positions, q, k, factor, LOW_CLOSE if low else CLOSE))
    if not rotations:
        raise NotTestableError("no queries and keys could be seen, or their content differs by position")
    return rotations


def choose_positions(subject: ModelSubject) -> Tensor:
    """Positions to look at: thousands, where a model takes any."""
    scalings = [position.rotary.scaling.get("rope_type") for position in subject.known.values() if position.rotary]
    limit = 10**9
    if any(kind in ("dynamic", "longrope") for kind in scalings) or _has_rows(subject):
        limit = subject.limit
    if not subject.positions:
        longer = LONG_TEXT if subject.ours and not subject.kinds & set(ABSOLUTE) else 0
        return torch.arange(max(subject.length, longer))
    return torch.tensor([position for position in POSITIONS if position < limit])


def _has_rows(subject: ModelSubject) -> bool:
    """Whether its cosines and sines are a table of as many rows as there are positions."""
    tables = any(isinstance(getattr(layer.module, "embed_positions", None), Tensor) for layer in subject.layers)
    return tables or any(position.table is not None for position in subject.known.values())


Content = tuple[Tensor, Tensor, list[Tensor]]


def repeated_token(
    subject: Subject, positions: Tensor, rows: bool, token: Tensor
) -> tuple[dict[str, Content], dict[str, bool]]:
    """Queries and keys (positions, heads, head_dim) of each layer for one token; whether their content is constant.

    Args:
        subject: What is checked.
        positions: Those to look at; without `rows`, those of a text.
        rows: Whether each position has a row of its own, which the subject must take.
        token: The token that is repeated, (1, 1).
    """
    calls: dict[str, Content] = {}
    constant: dict[str, bool] = {}

    def by_position(x: Tensor) -> Tensor:
        """(positions, heads, head_dim)"""
        return (x[:, :, -1] if rows else x[0].transpose(0, 1)).double()

    def listen(call: AttentionCall) -> None:
        if call.layer in calls or call.q is None or call.k is None or call.q.shape[2] != call.k.shape[2]:
            return
        calls[call.layer] = (by_position(call.q), by_position(call.k), [content(x) for x in call.projections])
        constant[call.layer] = all(
            is_constant(content(x)) for x in call.projections[:1]
        )  # norms may follow the rotation

    def content(x: Tensor) -> Tensor:
        """(positions, values); no values, if the axes of an output are not those of the input."""
        if x.dim() == 4 and x.shape[1] != ids.shape[1] and x.shape[2] == ids.shape[1]:
            x = x.transpose(1, 2)  # (batch, heads, length, head_dim)
        if x.dim() < 3 or x.shape[:2] != ids.shape:
            return x.new_zeros(1, 0).double()
        return (x[:, -1] if rows else x[0]).flatten(1).double()

    if rows:
        ids = token.expand(len(positions), REPEATED)
        inputs = {"position_ids": positions[:, None].expand(-1, REPEATED).to(ids.device)}
    else:
        ids, inputs = token.expand(1, len(positions)), {}
    with subject.captured(listen):
        subject.run(ids, **inputs)
    return calls, constant


def is_constant(x: Tensor) -> bool:
    """Whether all rows are the same to rounding."""
    if not x.numel():
        return True
    return float((x - x[:1]).norm(dim=1).max()) <= 0.02 * (float(x[:1].norm()) or 1.0)


def factor_of(k: Tensor, projections: Sequence[Tensor], expected: Rotary | None) -> float | None:
    """The factor of rotated keys over the projection that they come from, found by its values at position 0."""
    if expected is None:
        return None
    part = k[0][:, expected.start : expected.start + expected.rotated].abs().sort(-1).values  # (heads, rotated)
    best: tuple[float, float] | None = None
    for output in projections:
        if not output.numel():
            continue
        row = output[0]
        for start in (0, expected.start):
            size = k.shape[-1] if row.numel() % k.shape[-1] == 0 else expected.rotated
            if row.numel() % size or size < expected.rotated:
                continue
            vectors = row.view(-1, size)
            if size > expected.rotated:
                vectors = vectors[:, start : start + expected.rotated]
            if vectors.shape[1] != expected.rotated:
                continue
            ordered = vectors.abs().sort(-1).values
            for mine in part[:1]:
                ratio = (ordered @ mine) / ordered.pow(2).sum(-1).clamp(min=1e-30)
                left = (mine - ratio[:, None] * ordered).norm(dim=-1) / mine.norm()
                index = int(left.argmin())
                if best is None or float(left[index]) < best[0]:
                    best = float(left[index]), float(ratio[index])
    return best[1] if best is not None and best[0] < 2e-3 else None


# -- Tests


def worst_by_layer(rotations: Sequence[LayerRotation]) -> list[float]:
    """How far each layer is from its configuration."""
    return [
        max(float(rotation.off(x, rotation.expected).max()) for x in (rotation.q, rotation.k)) for rotation in rotations
    ]


def probed(subject: Subject) -> Outcome:
    """Without a configuration: queries and keys must be rotated alike."""
    positions = torch.arange(subject.length)
    calls, constant = repeated_token(subject, positions, False, subject.tokens(1, 1, 0))
    rotations = []
    for index, (name, (q, k, _)) in enumerate(calls.items()):
        expected = estimate(q, positions, None) or estimate(k, positions, None)
        if constant[name] and expected is not None:
            rotations.append(LayerRotation(NumberedLayer(index, name), expected, positions, q, k, None))
    if not rotations:
        raise NotTestableError("no rotation of queries and keys was seen, and nothing says that there must be one")
    off = worst_by_layer(rotations[:1])[0]  # of the first layer: the content of later ones may depend on the position
    first = rotations[0]
    assert first.expected is not None
    words = f"{rotary_words(first.expected)}, measured"
    if off <= CLOSE:
        return Outcome(False, off, f"q and k alike: {words}")
    evidence = {"rotations": rotations, "wrong": [0], "subject": subject}
    return Outcome(True, off, f"q and k are rotated differently: {words}", f"layer {first.layer.index + 1}", evidence)


def rotation(subject: Subject) -> Outcome:
    """Compare what runs with what the configuration says."""
    if not isinstance(subject, ModelSubject):
        return probed(subject)
    rotations = measured(subject)
    off = worst_by_layer(rotations)
    wrong = [number for number, amount in enumerate(off) if amount > CLOSE]
    if not wrong:
        return Outcome(
            False,
            max(off),
            f"{max(off):.1g} in {len(rotations)} layers up to position {rotations[0].positions.max():,}",
        )
    first = rotations[wrong[0]]
    by_position = torch.maximum(first.off(first.q, first.expected), first.off(first.k, first.expected))
    begins = int(first.positions[(by_position > CLOSE).nonzero()[0]])
    numbers = layer_numbers([rotations[number].layer.index + 1 for number in wrong], subject.layers[-1].index + 1)
    amount = max(off)
    return Outcome(
        True,
        amount,
        f"off by {amount:.2g}: {describe(first)}",
        f"position {begins}, {numbers}",
        {"rotations": rotations, "wrong": wrong, "subject": subject},
    )


def attention_factor(subject: Subject) -> Outcome:
    """Compare the factor of cosines and sines."""
    known = [each for each in measured(as_model(subject)) if each.factor is not None and each.expected is not None]
    if not known:
        raise NotTestableError("the keys before the rotation could not be seen")
    for each in known:
        assert each.factor is not None
        assert each.expected is not None
        if abs(each.factor / each.expected.factor - 1) > SAME_FACTOR:
            words = f"{each.factor:.4g} for {each.expected.factor:.4g}"
            evidence = {"factor": each.factor, "expected": each.expected.factor}
            return Outcome(
                True, abs(each.factor / each.expected.factor - 1), words, f"layer {each.layer.index + 1}", evidence
            )
    return Outcome(False, 0.0, f"{known[0].factor:.4g}")


def precision(subject: Subject) -> Outcome:
    """In the model's own dtype, the error of the rotation must not grow with the position."""
    subject = as_model(subject)
    if subject.ours and "rotary" in subject.kinds:
        raise NotTestableError("its kernel rotates, and computes all angles in float32")
    with subject.in_own_dtype():
        rotations = [each for each in measured(subject) if each.expected is not None]
    if not rotations:
        raise NotTestableError("no rotated queries and keys could be seen")
    first = rotations[0]
    if int(first.positions.max()) <= 256:
        raise NotTestableError(f"its positions end at {int(first.positions.max())}, and rounding shows from 256 on")
    off = torch.stack(
        [torch.maximum(each.off(each.q, each.expected), each.off(each.k, each.expected)) for each in rotations]
    )
    worst = off.amax(0)  # (positions,)
    near, far = worst[first.positions <= 65].max(), worst[first.positions > 256].max()
    dtype = next(subject.model.parameters()).dtype
    grows = bool(far > max(LOW_CLOSE, 4 * float(near)))
    words = f"error {near:.1g} up to position 65, {far:.2g} beyond 256, in {str(dtype).removeprefix('torch.')}"
    begins = int(first.positions[(worst > LOW_CLOSE).nonzero()[0]]) if grows else 0
    evidence = {"rotations": rotations, "wrong": range(len(rotations))}
    return Outcome(grows, float(far), words, f"position {begins}" if grows else "", evidence)


def describe(rotation: LayerRotation) -> str:
    """What runs, in words, as far as it can be told."""
    found = estimate(rotation.q, rotation.positions, rotation.expected)
    if found is None:
        return "no rotation" if float(rotation.off(rotation.q, None).max()) <= CLOSE else "another rotation"
    return f"measured {rotary_words(found)}"


def rotary_words(rotary: Rotary) -> str:
    """A measured rotation in words."""
    theta = theta_of(rotary)
    base = "" if theta is None else f", theta {theta:,.0f}" if theta >= 1000 else f", theta {theta:.4g}"
    backwards = ", backwards" if bool((rotary.frequencies[:1] < 0).all()) else ""
    return f"{rotary.rotated} of {rotary.head_dim} dimensions, {rotary.layout} layout{base}{backwards}"


def estimate(x: Tensor, positions: Tensor, expected: Rotary | None) -> Rotary | None:
    """The rotation of queries (positions, heads, head_dim), from the first of which all others are turned.

    Every layout and number of rotated dimensions is tried: those are right whose pairs keep their norms.
    """
    size = x.shape[-1]
    changed = ((x - x[:1]).abs().amax((0, 1)) > 1e-5 * x.abs().max()).nonzero().flatten()
    if not len(changed):
        return None
    start = int(expected.start) if expected is not None else 0
    for rotated in sorted(
        {size - start, (size - start) // 2, (size - start) // 4, *([] if expected is None else [expected.rotated])}
    ):
        if rotated < 2 or rotated % 2 or int(changed.max()) >= start + rotated:
            continue
        for layout in ("half", "interleaved"):
            part = x[..., start : start + rotated]
            a, b = part.chunk(2, -1) if layout == "half" else (part[..., 0::2], part[..., 1::2])
            z = torch.complex(a, b)  # (positions, heads, pairs)
            kept = (z.abs() - z[:1].abs()).norm() / z.abs().norm()
            if float(kept) > 1e-2:
                continue
            turns = (z * z[:1].conj()).sum(1)  # (positions, pairs)
            theta = torch.zeros(rotated // 2, dtype=torch.float64)
            last = 0
            for row, position in enumerate(positions.tolist()):
                if position > 0 and (last == 0 or position <= 4 * last):
                    guess = theta * position
                    angle = turns[row].angle()
                    theta = (angle + 2 * math.pi * ((guess - angle) / (2 * math.pi)).round()) / position
                    last = position
            return Rotary(theta, layout, size, start=start)
    return None


def theta_of(rotary: Rotary) -> float | None:
    """The base of frequencies that fall geometrically; None if they do not."""
    frequencies = rotary.frequencies.abs()
    pairs = torch.arange(len(frequencies), dtype=torch.float64)
    if len(frequencies) < 2 or bool((frequencies[1:] <= 1e-9).any()):
        return None
    exponents = -frequencies[1:].log() / (2 * pairs[1:] / rotary.rotated)
    if float(exponents.std() if len(exponents) > 1 else 0) > 0.02 * abs(float(exponents.mean())):
        return None
    return math.exp(float(exponents.mean()))


def first_rotary(subject: Subject, length: int) -> tuple[str, Rotary | None]:
    """The first layer that rotates, and how; the first layer, if none does."""
    if isinstance(subject, ModelSubject):
        layer = next((layer for layer in subject.layers if subject.known[layer.name].kind == "rotary"), None)
        described = None if layer is None else subject.known[layer.name].rotary
        if layer is None or described is None:
            return subject.layers[0].name, None
        return layer.name, expected_rotary(layer, described, length)
    positions = torch.arange(subject.length)
    calls, _ = repeated_token(subject, positions, False, subject.tokens(1, 1, 0))
    return next(((name, estimate(q, positions, None)) for name, (q, _, _) in calls.items()), ("", None))


def cached_positions(subject: Subject, read: Callable[[Tensor], object], total: int) -> dict[str, Any]:
    """At which positions the queries of a text were turned, or looked up, and which keys they saw.

    `read` reads token ids (1, total), piece by piece.
    """
    seen: list[tuple[Tensor, Tensor]] = []
    rows: list[int] = []
    name, rotary = first_rotary(subject, total)
    layers = subject.layers if isinstance(subject, ModelSubject) else []
    table = next((x for x in (layer.table for layer in layers) if x is not None), None)

    def listen(call: AttentionCall) -> None:
        if call.layer == name and call.q is not None:
            seen.append((call.q[0].transpose(0, 1).double(), call.visible()))

    def look(weight: Tensor, ids: Tensor) -> None:
        if (
            table is not None
            and weight.data_ptr() + table[1] * weight.shape[1] * weight.element_size() == table[0].data_ptr()
        ):
            rows.extend((ids.flatten() - table[1]).tolist())

    ids = subject.tokens(1, total, 0)
    with subject.captured(listen, look):
        read(ids)
    cached, rows_read = list(seen), list(rows)
    seen.clear()
    with subject.captured(listen):
        subject.run(ids)
    evidence: dict[str, Any] = {"visible": [visible for _, visible in cached]}
    if rotary is not None and cached and len(seen) == 1:
        queries, whole = torch.cat([q for q, _ in cached]), seen[0][0]  # (total, heads, head_dim)
        if queries.shape == whole.shape and queries.shape[-1] == rotary.head_dim:
            places = torch.arange(2 * total, dtype=torch.float64)[:, None]
            nearest = []
            for place, query in enumerate(queries):
                content = rotary.undo(whole[place : place + 1], places[place : place + 1])
                turned = rotary.apply(content.expand(len(places), -1, -1), places)
                nearest.append(int((turned - query).flatten(1).norm(dim=1).argmin()))
            evidence["positions"] = nearest
    elif rows_read:
        evidence["positions"] = rows_read
    return evidence


TESTS = (
    Test(
        "rotation",
        "rotation as configured",
        rotation,
        "Queries and keys are not turned as the configuration says.",
        "Compare theta, the rotated dimensions, their layout and the scaling with the configuration, layer by layer.",
        2,
    ),
    Test(
        "attention factor",
        "attention factor as configured",
        attention_factor,
        "The factor of cosines and sines (YaRN, LongRoPE) is not the one that the configuration gives.",
        part=2,
    ),
    Test(
        "precision",
        "precision of positions",
        precision,
        "The error of the angles grows with the position: positions or frequencies are computed in low precision.",
        "Compute positions, frequencies and angles in float32, and round only the cosines and sines.",
    ),
)
