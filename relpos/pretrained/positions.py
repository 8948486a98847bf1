"""Where position lives in a transformers model: per layer, and in words."""

from transformers import PreTrainedModel

from relpos.pretrained.families import ADAPTERS
from relpos.pretrained.layer_position import LayerPosition, ModelLayer, Rotary, model_layers

__all__ = ["LayerPosition", "Rotary", "layer_numbers", "layer_positions", "summary"]


def layer_positions(model: PreTrainedModel, length: int | None = None) -> list[LayerPosition]:
    """Where position lives in a model, per attention layer.

    Args:
        model: A model of transformers, or one of ours.
        length: Of the input, for rotations that depend on it (the scalings "dynamic" and "longrope"); by default they
            are those of the trained length.

    Returns:
        The attention layers in order. Linear attention has no scores and is left out; in ALBERT, one layer is applied
        several times. A layer of a family that is not known has kind "unknown".

    Raises:
        TypeError: It is not a model of transformers.

    Example:
        >>> layer_positions(model)[0].words
        'RoPE, theta 100,000, all 64 dimensions, half layout'
    """
    return [_describe(layer) for layer in _layers(model, length)]


def summary(model: PreTrainedModel) -> list[str]:
    """The positions of a model in words, one line per group of equal layers.

    Args:
        model: A model of transformers, or one of ours.

    Returns:
        The lines, as in "layers 1–30: RoPE, theta 100,000, all 64 dimensions, half layout".

    Raises:
        TypeError: It is not a model of transformers.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    totals: dict[str, int] = {}
    for layer in _layers(model):
        title = " ".join(word for word in (layer.stack, "cross attention" if layer.cross else "") if word)
        groups.setdefault((title, _describe(layer).words), []).append(layer.index + 1)
        totals[title] = max(totals.get(title, 0), layer.index + 1)
    return [
        f"{title + ' ' if title else ''}{layer_numbers(numbers, totals[title])}: {words}"
        for (title, words), numbers in groups.items()
    ]


def layer_numbers(numbers: list[int], total: int) -> str:
    """Some of the layers 1 to total: "layer 3", "layers 1–30", "every 4th layer", "layers 1–26 but every 6th".

    Args:
        numbers: Of the layers, ascending.
        total: How many layers there are.
    """
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    ranges = [f"{start}" if start == end else f"{start}–{end}" for start, end in zip(starts, ends, strict=True)]
    if len(ranges) > 2:
        others = [number for number in range(1, total + 1) if number not in numbers]
        for regular, before in ((numbers, "every {} layer"), (others, f"layers 1–{total} but every {{}}")):
            step = regular[1] - regular[0] if len(regular) > 1 else 0
            if step > 1 and regular == list(range(regular[0], total + 1, step)):
                start = "" if regular[0] == step else f" from {regular[0]} on"
                return before.format(_ordinal(step)) + start
    return "layers " + ", ".join(ranges)


def _ordinal(number: int) -> str:
    """2nd, 3rd, 4th."""
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"


def _layers(model: PreTrainedModel, length: int | None = None) -> list[ModelLayer]:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"positions are read from a model of transformers, not from {type(model).__name__}.")
    return list(model_layers(model, length))


def _describe(layer: ModelLayer) -> LayerPosition:
    for adapter in ADAPTERS:
        if layer.model_type in adapter.types:
            if layer.cross:
                return LayerPosition(layer.name, "none", "no position")
            position = adapter.describe(layer)
            if position is not None:
                return position
    missing = f"relpos does not know where models of type {layer.model_type!r} keep their position"
    return LayerPosition(layer.name, "unknown", f"{missing}; their attention weights can be drawn")
