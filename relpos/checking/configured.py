"""Part 2: windows, sinks, biases and tables, measured where they act, against the configuration."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relpos.attend import scores
from relpos.checking.capture import HIDDEN, AttentionCall
from relpos.checking.check_subject import ModelSubject, NotApplicableError, NotTestableError, Subject, as_model
from relpos.checking.fingerprints import UNMOVED, visibility
from relpos.checking.outcomes import Outcome, Test, difference
from relpos.encodings.alibi import press
from relpos.encodings.rope import Rope
from relpos.encodings.t5 import bucket
from relpos.encodings.window import Window
from relpos.models.family import family_of
from relpos.pretrained.families.relpos_models import parts
from relpos.pretrained.layer_position import ModelLayer
from relpos.pretrained.positions import layer_numbers

BIAS_CLOSE = 2e-3  # relative to the largest bias
SMALLEST_BIAS = 1e-3  # that counts: scores are rounded
ROUNDED = {"falcon": 2e-2}  # model types that round their bias to bfloat16
TYPES = (None, "full_attention", "sliding_attention", "chunked_attention")  # of layers whose reach is known
SINK_MOVED = 2.0  # by which sinks are raised


def own_layers(subject: ModelSubject) -> list[ModelLayer]:
    """The layers that read the text of the test: of a model with two stacks, those of the decoder."""
    return [layer for layer in subject.layers if not subject.two_stacks or "decoder" in layer.name]


# -- Windows


@dataclass(frozen=True)
class Reach:
    """How many keys the last query of a layer sees, itself included, and how many it must see."""

    layer: ModelLayer
    expected: int
    measured: int
    limited: bool  # whether the configuration gives the layer a window or chunks that end within the text


def reaches(subject: ModelSubject) -> list[Reach]:
    """How far each causal layer looks back; each bidirectional one, to both sides of the middle."""
    length, causal = subject.length, bool(subject.causal)
    seen = visibility(subject)
    found = []
    for layer in own_layers(subject):
        if layer.name not in seen or subject.known[layer.name].kind == "unknown" or layer.layer_type not in TYPES:
            continue
        query = length - 1 if causal else length // 2
        visible = seen[layer.name][query]
        window, expected = layer.window, query + 1 if causal else length
        if layer.layer_type == "chunked_attention":
            expected = query % int(layer.config.attention_chunk_size) + 1
        elif window is not None:
            expected = min(query + 1, window) if causal else min(query, window) + min(length - 1 - query, window) + 1
        total = query + 1 if causal else length
        found.append(Reach(layer, expected, int(visible.sum()), expected < total))
    if not found:
        raise NotTestableError("the scores of its layers could not be seen")
    return found


def windows(subject: Subject) -> Outcome:
    """Each layer must see as far as its window, and no farther."""
    model = as_model(subject)
    found = reaches(model)
    wrong = [reach for reach in found if reach.expected != reach.measured]
    total = model.layers[-1].index + 1
    if wrong:
        first = wrong[0]
        numbers = layer_numbers([reach.layer.index + 1 for reach in wrong], total)
        words = f"{first.measured:,} keys for {first.expected:,}"
        evidence = {"reaches": found, "wrong": wrong, "causal": model.causal}
        return Outcome(True, abs(first.measured - first.expected), words, numbers, evidence)
    limited = [reach for reach in found if reach.limited]
    untested = [layer for layer in own_layers(model) if (layer.window or 0) >= model.length]
    if untested and not limited:
        raise NotTestableError(
            f"a window of {untested[0].window:,} tokens is beyond the {model.length:,} tokens of the test; "
            "a full check may reach it"
        )
    if not limited:
        return Outcome(False, 0.0, f"{len(found)} layers see everything")
    return Outcome(False, 0.0, f"{limited[0].expected:,} keys in {len(limited)} of {len(found)} layers")


# -- Sinks


def sinks(subject: Subject) -> Outcome:
    """Sinks must act: outputs change when they do."""
    model = as_model(subject)
    holders: list[tuple[ModelLayer, Tensor]] = [
        (layer, layer.module.sinks)
        for layer in own_layers(model)
        if isinstance(getattr(layer.module, "sinks", None), Tensor)
    ]
    if not holders:
        raise NotApplicableError
    ids = model.tokens(1, model.length, 0)
    before = model.run(ids)[0]
    dead = []
    for layer, parameter in holders:
        kept = parameter.data.clone()
        try:
            parameter.data = kept + SINK_MOVED
            moved = float(difference(model.run(ids)[0], before).max())
        finally:
            parameter.data = kept
        if moved <= UNMOVED:
            dead.append(layer.index + 1)
    if dead:
        numbers = layer_numbers(dead, model.layers[-1].index + 1)
        return Outcome(True, 0.0, "a change of the sinks changes nothing", numbers, {"dead": dead})
    return Outcome(False, 0.0, f"they act in {len(holders)} layers")


# -- Biases


@dataclass(frozen=True)
class LayerBias:
    """The bias of one layer by distance, up to a constant per query: that of distance 0 is 0."""

    layer: ModelLayer
    distances: Tensor  # (distances,), query minus key
    expected: Tensor  # (heads, distances)
    measured: Tensor

    def explained(self, bias: Tensor, close: float | None = None) -> bool:
        """Whether a bias (heads, distances) is the one that runs, up to a constant per head."""
        zero = int((self.distances == 0).nonzero()[0])
        bias = bias - bias[:, zero : zero + 1]
        size = max(SMALLEST_BIAS, *(float(x.abs().max()) for x in (self.measured, self.expected, bias)))
        limit = ROUNDED.get(self.layer.model_type, BIAS_CLOSE) if close is None else close
        return float((bias - self.measured).abs().max()) <= limit * size


def expected_bias(layer: ModelLayer, kind: str, distances: Tensor) -> Tensor | None:
    """The bias that a configuration asks for, by our own formulas: (heads, distances)."""
    config = layer.config
    if kind == "alibi":
        heads = int(config.num_attention_heads)
        slopes = torch.tensor(press(heads), dtype=torch.float64)
        if layer.model_type == "mpt":
            slopes = torch.tensor(mpt_slopes(heads, config.attn_config.alibi_bias_max), dtype=torch.float64)
        if layer.model_type == "falcon":
            slopes = slopes / math.sqrt(config.hidden_size // heads)
        return -slopes[:, None] * distances
    owners: list[Any] = [module for module in layer.part.modules() if hasattr(module, "relative_attention_bias")]
    if kind != "buckets" or not owners or layer.model_type == "mpnet":
        return None
    owner = layer.module if layer.module in owners else owners[0]
    table: Tensor = owner.relative_attention_bias.weight.detach().double()  # (buckets, heads)
    causal = bool(getattr(layer.module, "is_decoder", getattr(layer.part, "is_decoder", False)))
    which = bucket(distances.long(), causal, len(table), int(config.relative_attention_max_distance))
    return table[which].T


def mpt_slopes(heads: int, largest: int) -> list[float]:
    """MPT's rule: the slopes of the next power of two, the odd ones first, cut to the number of heads."""
    total = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-largest * h / total) for h in range(1, total + 1)]
    return slopes if total == heads else [*slopes[1::2], *slopes[0::2]][:heads]


def our_biases(subject: ModelSubject, ids: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The scores of our own layers for token ids (1, length) by their definition, without and with their encoding.

    The encodings are made from the configuration, and have the learned values of those that run. Layers that have
    rotations and windows alone are left out.
    """
    model: Any = subject.model
    numbers = {layer.index + 1: layer.name for layer in subject.layers}
    scored = {}
    for number, call in zip(numbers, family_of(model).calls(model, ids[0], numbers), strict=True):
        encoding = model.config.make_position(number)
        others = [part for part in parts(encoding) if not isinstance(part, Rope | Window)]
        if call.position is not None and any(part.places != ("embedding",) for part in others):
            encoding.load_state_dict(call.position.state_dict())
            content, own = (scores(call.q, call.k, x, **call.arguments)[0].double() for x in (None, encoding))
            scored[numbers[number]] = content, own
    return scored


def biases(subject: ModelSubject) -> list[LayerBias]:
    """The bias of each layer: one repeated token has equal content everywhere, and its scores differ by the bias."""
    kinds = {layer.name: subject.known[layer.name].kind for layer in subject.layers}
    length = min(subject.length, 40)
    ids = subject.tokens(1, length, 0) if subject.ours else subject.tokens(1, 1, 0).expand(1, length)
    of_ours = our_biases(subject, ids) if subject.ours else {}
    if not of_ours and not set(kinds.values()) & {"alibi", "buckets"}:
        raise NotApplicableError
    seen: dict[str, Tensor] = {}

    def listen(call: AttentionCall) -> None:
        if call.layer in kinds and call.layer not in seen:
            values = call.scores()[0].double()
            if values.shape[-1] == values.shape[-2] > 1:
                seen[call.layer] = values

    with subject.captured(listen):
        if subject.two_stacks:
            subject.model(input_ids=ids, decoder_input_ids=ids, use_cache=False)
        else:
            subject.run(ids)
    found = []
    for layer in subject.layers:
        if layer.name not in seen or (kinds[layer.name] not in ("alibi", "buckets") and layer.name not in of_ours):
            continue
        values = seen[layer.name]  # (heads, length, length)
        size = values.shape[-1]
        both = bool(values[0, 0, -1] > HIDDEN)
        query = size // 2 if both else size - 1
        distances = query - torch.arange(size, dtype=torch.float64)
        row = values[:, query]  # (heads, keys)
        expected = expected_bias(layer, kinds[layer.name], distances)
        if layer.name in of_ours:
            content, own = (x[:, query] for x in of_ours[layer.name])
            row, expected = row - content, own - content
        if expected is None:
            continue
        row, expected = (x.clamp(min=HIDDEN) - x[:, query : query + 1] for x in (row, expected))
        found.append(LayerBias(layer, distances, expected, row))
    if not found:
        raise NotTestableError("the scores of its layers could not be seen, or their content is not constant")
    return found


def bias(subject: Subject) -> Outcome:
    """The bias by distance must be that of the formula."""
    model = as_model(subject)
    found = biases(model)
    wrong = [each for each in found if not each.explained(each.expected)]
    if not wrong:
        return Outcome(False, 0.0, f"the formula in {len(found)} layers")
    first = wrong[0]
    gap = (first.expected - first.measured).abs()
    head, place = divmod(int(gap.argmax()), gap.shape[1])
    amount = float(gap.max()) / (float(first.expected.abs().max()) or 1.0)
    at = int(
        first.distances[(gap.amax(0) > BIAS_CLOSE * float(first.expected.abs().max())).nonzero().flatten()].abs().min()
    )
    words = f"{first.measured[head, place]:.3g} for {first.expected[head, place]:.3g} in head {head + 1}"
    numbers = layer_numbers([each.layer.index + 1 for each in wrong], model.layers[-1].index + 1)
    return Outcome(True, amount, words, f"distance {at}, {numbers}", {"biases": found, "wrong": wrong})


# -- Tables of absolute positions


def table_rows(subject: ModelSubject) -> tuple[int, list[int]]:
    """The row of the first token in the table of positions, and the rows that a text has looked up."""
    tables = [
        layer.table for layer in own_layers(subject) if subject.known[layer.name].kind in ("learned", "sinusoidal")
    ]
    known = next((table for table in tables if table is not None), None)
    if known is None:
        raise NotApplicableError
    rows, first = known
    looked_up: list[int] = []

    def look(weight: Tensor, ids: Tensor) -> None:
        start = weight.data_ptr() + first * weight.shape[-1] * weight.element_size()
        if weight.dim() == 2 and start == rows.data_ptr() and not looked_up:
            looked_up.extend(ids.flatten().tolist())

    length = min(subject.length, len(rows))
    with subject.captured(lambda call: None, look):
        subject.run(subject.tokens(1, length, 0))
    if not looked_up:
        raise NotTestableError("no row of its table of positions was seen to be looked up")
    return first, looked_up


def table(subject: Subject) -> Outcome:
    """A text must read the rows of its table one after the other, from the first token's on."""
    model = as_model(subject)
    first, rows = table_rows(model)
    expected = list(range(first, first + len(rows)))
    if rows == expected:
        return Outcome(False, 0.0, f"rows {first} to {rows[-1]}")
    at = next(place for place, (row, right) in enumerate(zip(rows, expected, strict=True)) if row != right)
    words = f"row {rows[at]} for {expected[at]}"
    return Outcome(True, abs(rows[at] - expected[at]), words, f"position {at}", {"rows": rows, "expected": expected})


TESTS: Sequence[Test] = (
    Test(
        "window",
        "windows as configured",
        windows,
        "A layer sees more keys, or fewer, than its configuration says.",
        part=2,
    ),
    Test("sinks", "sinks act", sinks, "The sinks of the checkpoint are not part of the softmax.", part=2),
    Test("bias", "bias as configured", bias, "The bias on the scores is not the one of the configuration.", part=2),
    Test(
        "table",
        "rows of the position table",
        table,
        "Tokens read other rows of the table of positions than they were trained with.",
        part=2,
    ),
)
