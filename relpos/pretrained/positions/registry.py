"""Every kind of position, and the model types that have it. To add one: write its file, add its line to `KINDS`."""

from types import ModuleType

from transformers import PreTrainedConfig, PreTrainedModel

from relpos.pretrained.positions import alibi, buckets, deberta, learned, ours, rotary, sinusoidal, table
from relpos.pretrained.positions.description import LayerPosition
from relpos.pretrained.positions.layer_numbers import layer_numbers
from relpos.pretrained.positions.outline import outline
from relpos.pretrained.positions.place import Place, places

KINDS: list[ModuleType] = [  # each has `FAMILIES`, model types, and `describe`; the first that describes a layer counts
    alibi,
    buckets,
    deberta,
    ours,
    rotary,
    sinusoidal,
    table,
    learned,
]


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
        TypeError: It is no model of transformers.

    Example:
        >>> layer_positions(model)[0].words
        'RoPE, theta 100,000, all 64 dimensions, halves'
    """
    return [describe(place) for place in all_places(model, length)]


def summary(model: PreTrainedModel) -> list[str]:
    """The positions of a model in words, one line per group of equal layers.

    Args:
        model: A model of transformers, or one of ours.

    Returns:
        The lines, as in "layers 1–30: RoPE, theta 100,000, all 64 dimensions, halves".

    Raises:
        TypeError: It is no model of transformers.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    totals: dict[str, int] = {}
    for place in all_places(model):
        title = " ".join(word for word in (place.stack, "cross attention" if place.cross else "") if word)
        groups.setdefault((title, describe(place).words), []).append(place.index + 1)
        totals[title] = max(totals.get(title, 0), place.index + 1)
    return [
        f"{title + ' ' if title else ''}{layer_numbers(numbers, totals[title])}: {words}"
        for (title, words), numbers in groups.items()
    ]


def summary_of_config(config: PreTrainedConfig) -> list[str]:
    """The same from a configuration alone, without weights.

    Args:
        config: Of a model of transformers, or of ours.

    Raises:
        ValueError: No model can be built from it.
    """
    return summary(outline(config))


def describe(place: Place) -> LayerPosition:
    """Where position lives in one layer."""
    family = place.config.model_type
    for kind in KINDS:
        if family in kind.FAMILIES:
            if place.cross:
                return LayerPosition(place.name, "none", "no position")
            position: LayerPosition | None = kind.describe(place)
            if position is not None:
                return position
    missing = f"relpos does not know where models of type {family!r} keep their position"
    return LayerPosition(place.name, "unknown", f"{missing}; their attention weights can be drawn")


def all_places(model: PreTrainedModel, length: int | None = None) -> list[Place]:
    """The attention layers of a model.

    Raises:
        TypeError: It is no model of transformers.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"positions are read from a model of transformers, not from {type(model).__name__}.")
    return list(places(model, length))
