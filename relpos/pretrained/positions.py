"""Where position lives in a transformers model: per layer, and in words; from its configuration alone where asked."""

import re
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from relpos.model_catalogue import PREFIX
from relpos.pretrained.families import ADAPTERS
from relpos.pretrained.layer_position import LayerPosition, ModelLayer, model_layers
from relpos.pretrained.probe import configurations
from relpos.pretrained.transplant import ORIGINALS
from relpos.pretrained.use import refused_part

LAYERS = 10_000  # more than any model has; experts likewise
LARGEST = 2**63 - 1  # of any size of a tensor
REPEATED = re.compile("(layers?|experts|blocks|depth)$")  # names of entries: how often something is built


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
    return [_describe(layer) for layer in model_layers(model, length)]


def summary(model: PreTrainedModel) -> list[str]:
    """The positions of a model in words, one line per group of equal layers.

    Example:
        >>> summary(model)
        ['layers 1–30: RoPE, theta 100,000, all 64 dimensions, half layout']
    """
    groups: dict[tuple[str, str], list[int]] = {}
    totals: dict[str, int] = {}
    for layer in model_layers(model):
        title = " ".join(word for word in (layer.stack, "cross attention" if layer.cross else "") if word)
        groups.setdefault((title, _describe(layer).words), []).append(layer.index + 1)
        totals[title] = max(totals.get(title, 0), layer.index + 1)
    return [
        f"{title + ' ' if title else ''}{layer_numbers(numbers, totals[title])}: {words}"
        for (title, words), numbers in groups.items()
    ]


def layer_numbers(numbers: list[int], total: int) -> str:
    """Some of the layers 1 to total: "layer 3", "layers 1–30", "every 4th layer", "layers 1–26 but every 6th"."""
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
                ending = "th" if step % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(step % 10, "th")
                return before.format(f"{step}{ending}") + start
    return "layers " + ", ".join(ranges)


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


@dataclass(frozen=True)
class Facts:
    """A model in numbers and words; of a model with several stacks, the sizes are those of its text decoder."""

    model_type: str
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    trained_length: int | None  # None if the configuration does not limit it
    positions: list[str]  # one line per group of equal layers
    use: bool  # whether relpos.use takes it
    use_reason: str  # why not, or what remains to be checked
    transplant: bool  # whether relpos.transplant takes it


def facts(config: PreTrainedConfig) -> Facts:
    """What is known of a model from its configuration alone, before any weights are loaded."""
    model = outline(config)
    text = config.get_text_config(decoder=True)
    layers, heads, head_dim = (
        size if isinstance(size := getattr(text, name, None), int) else 0
        for name in ("num_hidden_layers", "num_attention_heads", "head_dim")
    )
    ours = config.model_type.startswith(PREFIX)
    refusal = None if ours else refused_part(model)
    return Facts(
        model_type=config.model_type,
        layers=layers,
        heads=heads,
        key_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=head_dim or (text.hidden_size // heads if heads else 0),
        trained_length=longest(model),
        positions=summary(model),
        use=refusal is None,
        use_reason=refusal[1] if refusal else "runs on relpos as it is" if ours else "checked by one small forward",
        transplant=config.model_type.removeprefix(PREFIX) in ORIGINALS,
    )


def longest(model: PreTrainedModel) -> int | None:
    """The most tokens that a model was made for: by its table of positions, else by its configuration, else None."""
    config = model.config.get_text_config(decoder=True)
    tables = [len(position.table) for position in layer_positions(model) if position.table is not None]
    rows = tables[-1] if tables else (getattr(config, "position", None) or {}).get("length")
    entries = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len", "n_positions"))
    return rows or next((entry for entry in entries if isinstance(entry, int)), None)


def outline(config: PreTrainedConfig) -> PreTrainedModel:
    """A model without a head and without values, on the "meta" device; with its head if there is no other class."""
    for part in configurations(config):
        for name, value in part.to_dict().items():
            most = LAYERS if REPEATED.search(name) else LARGEST
            if isinstance(value, int) and value > most:
                raise ValueError(f"the configuration has {name} = {value:,}; at most {most:,} is possible.")
    try:
        with torch.device("meta"), no_init_weights():
            if type(config) in AutoModel._model_mapping:
                model: PreTrainedModel = AutoModel.from_config(config)
                return model
            model_class: Any = named_class(config)
            if model_class is None:
                raise ValueError(f"transformers has no model of type {config.model_type!r}")
            return model_class(config)
    except Exception as error:  # a model's own code may raise anything for entries that contradict each other
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"no model can be built from this {type(config).__name__} ({reason}).") from error


def named_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that a configuration names; None if it names none."""
    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, PreTrainedModel):
            return named
    return None
