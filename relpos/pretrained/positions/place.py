"""An attention layer and where it stands in its model."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from relpos.pretrained.probe import attention_layers

CROSS = ("CrossAttention", "crossattention", "cross_attn", "encoder_attn", "EncDecAttention", "encoder_decoder_attn")


@dataclass(frozen=True)
class Place:
    """An attention layer, and the models that it is part of."""

    name: str  # of the layer in the whole model
    layer: Any
    parts: tuple[PreTrainedModel, ...]  # the models of its type around it, from the innermost outward
    stack: str  # of the part in the whole model; "" for a model of one stack
    index: int  # of its layer in the stack; 0 is the first
    length: int | None = None  # of the input, for what depends on it

    @property
    def part(self) -> PreTrainedModel:
        """The innermost model around it."""
        return self.parts[0]

    @property
    def config(self) -> Any:
        """The configuration of the part."""
        return self.part.config

    @property
    def cross(self) -> bool:
        """Whether the layer relates no tokens of one sequence to each other: `is_cross`."""
        return is_cross(self.name, self.layer)

    @property
    def layer_type(self) -> str | None:
        """Its entry in the configuration's `layer_types`, as "sliding_attention"."""
        types = getattr(self.config, "layer_types", None)
        number = getattr(self.layer, "layer_idx", None)
        return None if not types or number is None or number >= len(types) else str(types[number])


def is_cross(name: str, layer: nn.Module) -> bool:
    """Whether the keys of a layer come from another stack, or the query is a learned one that pools all tokens."""
    if isinstance(layer, nn.MultiheadAttention) or any(
        word in part for word in CROSS for part in (*name.split("."), type(layer).__name__)
    ):
        return True
    return bool(getattr(layer, "is_cross_attention", False))


def places(model: PreTrainedModel, length: int | None = None) -> Iterator[Place]:
    """The attention layers of a model, in order, for inputs of a length."""
    parts = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    layers = attention_layers(model)

    def parts_of(name: str) -> list[str]:
        around = [part for part in parts if not part or name.startswith(f"{part}.")]
        return sorted(around, key=len, reverse=True)

    sorts: dict[tuple[str, bool], list[str]] = {}
    for name, layer in layers.items():
        sorts.setdefault((parts_of(name)[0], is_cross(name, layer)), []).append(name)
    several = len({part for part, _ in sorts}) > 1
    numbers = {name: number for (part, _), names in sorts.items() for name, number in numbered(names, part).items()}
    for name, layer in layers.items():
        inner, *_ = around = parts_of(name)
        family = parts[inner].config.model_type
        same = tuple(parts[part] for part in around if parts[part].config.model_type == family)
        yield Place(name, layer, same, inner.rpartition(".")[2] if several else "", numbers[name], length)


def numbered(names: list[str], part: str) -> dict[str, int]:
    """The numbers of layers from their names, as in "layers.3.self_attn"; from their order if that is not enough."""
    found = [re.search(r"\.(\d+)\.", name[len(part) :]) for name in names]
    numbers = [-1 if match is None else int(match[1]) for match in found]
    unique = len(set(numbers)) == len(numbers) and min(numbers) >= 0
    return dict(zip(names, numbers if unique else range(len(names)), strict=True))
