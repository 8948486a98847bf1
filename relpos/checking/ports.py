"""Part 4: two ports of one model. Same weights, same tokens: where their scores part, and by what pattern.

Scores are compared, not queries and keys: a port that stores the dimensions of its heads in another order is right.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relpos.checking.capture import HIDDEN, AttentionCall
from relpos.checking.check_subject import ModelSubject, Subject
from relpos.checking.configured import LayerBias, Reach
from relpos.checking.findings import FAILED, NOT_TESTED, PASSED, Finding
from relpos.checking.outcomes import LARGEST, TOLERANCE, difference
from relpos.checking.rotations import (
    CLOSE,
    LONG_TEXT,
    LayerRotation,
    NumberedLayer,
    describe,
    estimate,
    repeated_token,
    rotary_words,
)
from relpos.pretrained.positions import layer_numbers

BAND_CLOSE = 0.01  # relative error of a frequency that counts as none
TITLE = "the same as the other port"
WEIGHTS = "The ports differ in the first layer before any position acts (at distance 0): other weights, norms or scale."
POSITIONS = "The ports agree at distance 0 and part with the distance: their positions differ."


@dataclass(frozen=True)
class PortCalls:
    """What each call of attention of a port computed."""

    names: list[str]
    scores: list[Tensor]  # (heads, length, length)
    output: Tensor  # (length, width)


def calls_of(subject: Subject, ids: Tensor) -> PortCalls:
    """The scores of all calls of self-attention, in order."""
    names: list[str] = []
    scores: list[Tensor] = []

    def listen(call: AttentionCall) -> None:
        values = call.scores()[0].double()
        if values.shape[-2:] == (ids.shape[1], ids.shape[1]):
            names.append(call.layer)
            scores.append(values)

    with subject.captured(listen):
        output = subject.run(ids)[0]
    return PortCalls(names, scores, output)


def ports(subject: Subject, other: Subject) -> list[Finding]:
    """The findings of a comparison of two ports."""
    source = other if isinstance(other, ModelSubject) else subject
    for length in lengths(subject, other):
        ids = source.tokens(1, length, 0)
        own, right = subject.run(ids)[0], other.run(ids)[0]
        if own.shape != right.shape:
            reason = f"they return {tuple(own.shape)} and {tuple(right.shape)} for the same tokens"
            return [Finding("ports", TITLE, NOT_TESTED, words=reason)]
        gaps = difference(own, right)
        amount = float(gaps.max())
        if amount > TOLERANCE:
            break
    else:
        return [Finding("ports", TITLE, PASSED, amount, f"{amount:.1g} in {length} tokens")]
    mine, theirs = calls_of(subject, ids), calls_of(other, ids)
    position = int((gaps > TOLERANCE).nonzero()[0])
    curve = tuple(gaps.clamp(max=LARGEST).tolist())
    parted = first_parting(mine, theirs)
    if parted is None:
        words = "Their attention scores are the same: they part outside of attention, or it could not be seen."
        begins = f"position {position}"
        return [Finding("ports", TITLE, FAILED, amount, f"off by {amount:.2g}", begins, None, words, differences=curve)]
    layer, head, distance = parted
    begins = f"layer {layer + 1}, head {head + 1}, distance {distance}; position {position}"
    diagnosis = WEIGHTS if layer == 0 and distance == 0 else POSITIONS
    parting = Finding(
        "ports", TITLE, FAILED, amount, f"off by {amount:.2g}", begins, None, diagnosis, differences=curve
    )
    return [*patterns(subject, other, mine, theirs, source.tokens(1, 1, 0).expand(1, length)), parting]


def lengths(subject: Subject, other: Subject) -> list[int]:
    """Tokens of the texts that are compared: short ones first, then some hundreds, where rounded positions show."""
    limits = [each.limit for each in (subject, other) if isinstance(each, ModelSubject)]
    return [min(subject.length, other.length), *([LONG_TEXT] if limits and min(limits) >= LONG_TEXT else [])]


def aligned(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """Scores without what changes no weight: a constant per query; and 0 where both are hidden."""
    hidden = (one <= HIDDEN) & (two <= HIDDEN)
    cleaned = []
    for x in (one, two):
        clipped = x.clamp(min=HIDDEN)
        cleaned.append((clipped - clipped.diagonal(dim1=-2, dim2=-1)[..., None]).masked_fill(hidden, 0.0))
    return cleaned[0], cleaned[1]


def first_parting(mine: PortCalls, theirs: PortCalls) -> tuple[int, int, int] | None:
    """The first layer and head, and the smallest distance, at which the scores differ; None if nowhere."""
    for layer, (one, two) in enumerate(zip(mine.scores, theirs.scores, strict=False)):
        if one.shape != two.shape:
            return layer, 0, 0
        spread = float(two[two > HIDDEN].std()) or 1.0
        own = (one - two).diagonal(dim1=-2, dim2=-1).abs().amax(-1) / spread  # (heads,)
        a, b = aligned(one, two)
        gap = (a - b).abs() / spread
        if float(own.max()) > TOLERANCE and layer == 0:
            return layer, int((own > TOLERANCE).nonzero()[0]), 0
        if float(gap.max()) > TOLERANCE:
            head = int((gap.amax((1, 2)) > TOLERANCE).nonzero()[0])
            i, j = (gap[head] > TOLERANCE).nonzero(as_tuple=True)
            return layer, head, int((i - j).abs().min())
    return None


def patterns(subject: Subject, other: Subject, mine: PortCalls, theirs: PortCalls, ids: Tensor) -> list[Finding]:
    """Findings on masks, rotations and biases, each as if the other port were the configuration.

    The ids (1, length) are those of one repeated token.
    """
    return [
        finding
        for finding in (
            masks(mine, theirs, bool(other.causal)),
            rotation(subject, other, mine, theirs, ids),
            bias(subject, other, ids),
        )
        if finding is not None
    ]


def masks(mine: PortCalls, theirs: PortCalls, causal: bool) -> Finding | None:
    """How far each layer of the two sees."""
    reaches = []
    for number, (one, two) in enumerate(zip(mine.scores, theirs.scores, strict=False)):
        seen, right = (int((x[0, -1] > HIDDEN).sum()) for x in (one, two))
        layer: Any = NumberedLayer(number, mine.names[number])
        reaches.append(Reach(layer, right, seen, right < one.shape[-1]))
    wrong = [reach for reach in reaches if reach.expected != reach.measured]
    if not wrong:
        return None
    numbers = layer_numbers([reach.layer.index + 1 for reach in wrong], len(reaches))
    words = f"{wrong[0].measured} keys for {wrong[0].expected}"
    evidence = {"reaches": reaches, "wrong": wrong, "causal": causal}
    return Finding(
        "window", "keys that are seen, as in the other port", FAILED, None, words, numbers, evidence=evidence
    )


def rotation(subject: Subject, other: Subject, mine: PortCalls, theirs: PortCalls, ids: Tensor) -> Finding | None:
    """How the two rotate, measured on one repeated token."""
    positions = torch.arange(ids.shape[1])
    own, own_constant = repeated_token(subject, positions, False, ids[:, :1])
    right, right_constant = repeated_token(other, positions, False, ids[:, :1])
    rotations: list[LayerRotation] = []
    for number, (name, other_name) in enumerate(zip(mine.names, theirs.names, strict=False)):
        if not (own_constant.get(name) and right_constant.get(other_name)):
            continue
        expected = estimate(right[other_name][0], positions, None)
        q, k, _ = own[name]
        rotations.append(LayerRotation(NumberedLayer(number, name), expected, positions, q, k, None))
    wrong = [
        number
        for number, each in enumerate(rotations)
        if q_differs(each) or (each.expected is None) != (estimate(each.q, positions, None) is None)
    ]
    if not wrong:
        return None
    first = rotations[wrong[0]]
    theirs_words = "no rotation" if first.expected is None else rotary_words(first.expected)
    words = f"{describe(first)}; the other: {theirs_words}{band(first)}"
    numbers = layer_numbers([rotations[number].layer.index + 1 for number in wrong], len(rotations))
    evidence = {"rotations": rotations, "wrong": wrong, "subject": subject}
    return Finding("rotation", "rotation as in the other port", FAILED, None, words, numbers, evidence=evidence)


def band(rotation: LayerRotation) -> str:
    """Which pairs of dimensions turn at another frequency, in words; nothing if they cannot be compared one by one."""
    measured, expected = estimate(rotation.q, rotation.positions, None), rotation.expected
    if (
        measured is None
        or expected is None
        or measured.rotated != expected.rotated
        or measured.layout != expected.layout
    ):
        return ""
    theirs = expected.frequencies.abs().clamp(min=1e-12)
    pairs = ((measured.frequencies - expected.frequencies).abs() > BAND_CLOSE * theirs).nonzero().flatten().tolist()
    if not pairs:
        return ""
    periods = [2 * math.pi / float(theirs[pair]) for pair in (pairs[0], pairs[-1])]
    return (
        f"; pairs {pairs[0] + 1} to {pairs[-1] + 1} of {len(theirs)} differ, which turn once in {periods[0]:,.0f} to "
        f"{periods[1]:,.0f} tokens"
    )


def q_differs(rotation: LayerRotation) -> bool:
    """Whether a port rotates by other frequencies; another order of dimensions alone is no difference."""
    found, expected = estimate(rotation.q, rotation.positions, None), rotation.expected
    if found is None or expected is None:
        return found is not expected
    if len(found.frequencies) != len(expected.frequencies):
        return True
    if found.layout == expected.layout:
        return max(float(rotation.off(x, expected).max()) for x in (rotation.q, rotation.k)) > CLOSE
    return True


def bias(subject: Subject, other: Subject, ids: Tensor) -> Finding | None:
    """The biases of the two by distance, where neither rotates: the scores of one repeated token."""
    length = ids.shape[1]
    mine, theirs = calls_of(subject, ids), calls_of(other, ids)
    distances = length - 1 - torch.arange(length, dtype=torch.float64)
    found = []
    for number, (one, two) in enumerate(zip(mine.scores, theirs.scores, strict=False)):
        rows = [x[:, -1] - x[:, -1:, -1] for x in (one, two)]  # (heads, keys)
        if rows[0].shape != rows[1].shape or any(bool((row < HIDDEN).any()) for row in rows):
            return None
        layer: Any = NumberedLayer(number, mine.names[number])
        found.append(LayerBias(layer, distances, rows[1], rows[0]))
    wrong = [each for each in found if not each.explained(each.expected)]
    if not wrong or not all(is_linear_or_table(each) for each in wrong):
        return None
    numbers = layer_numbers([each.layer.index + 1 for each in wrong], len(found))
    evidence = {"biases": found, "wrong": wrong}
    return Finding("bias", "bias as in the other port", FAILED, None, "another bias", numbers, evidence=evidence)


def is_linear_or_table(bias: LayerBias) -> bool:
    """Whether the other port has a bias that grows or falls with the distance, and not the waves of a rotation."""
    steps = bias.expected.diff(dim=1)
    return bool(((steps >= -1e-6).all(1) | (steps <= 1e-6).all(1)).all())
