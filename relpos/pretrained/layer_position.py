"""An attention layer of a transformers model, and what is known of its position."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from relpos.attend.arguments import RotaryFrequencies
from relpos.forms.rotation import turn_pairs
from relpos.models.attention import SelfAttention
from relpos.models.plan import layer_encodings
from relpos.pretrained.probe import attention_layers

ACTS_ON = {  # where each kind of position acts, in the words of the encodings
    "rotary": "query and key",
    "learned": "embedding",
    "sinusoidal": "embedding",
    "buckets": "score",
    "alibi": "score",
    "deberta": "score",
    "table 2-D": "score",
    "none": "nowhere",
}
CROSS = ("CrossAttention", "crossattention", "cross_attn", "encoder_attn", "EncDecAttention", "encoder_decoder_attn")
NORMS = ("q_norm", "q_layernorm", "qk_norm", "query_layernorm", "query_norm", "q_ln", "norm_q")
NORM_LAST = ("llama4_text", "nanochat")  # families that normalise after they rotate
TABLES = ("position_embeddings", "position_embedding", "embed_positions", "wpe", "positions_embed")


@dataclass(frozen=True)
class Rotary(RotaryFrequencies):
    """The rotation of queries and keys in one layer, as they reach attention.

    Dimensions `start` to `start + rotated` of a head are rotated in pairs: with the layout "half", pair m is
    (m, m + rotated / 2); with "interleaved" it is (2m, 2m + 1). A pair (a, b) of the token at position i becomes

        factor · (a·cos(i·θ_m) − b·sin(i·θ_m),  a·sin(i·θ_m) + b·cos(i·θ_m)).

    θ is `frequencies`, in radians per token with the scaling applied; negative where a model turns backwards.
    """

    head_dim: int
    factor: float = 1.0  # of cosines and sines: YaRN's and LongRoPE's attention factor
    scaling: Mapping[str, Any] = field(default_factory=dict)  # the model's own rope parameters
    start: int = 0  # the first rotated dimension; above 0 where a head ends with its rotated part

    @property
    def rotated(self) -> int:
        return 2 * self.frequencies.shape[-1]

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate projected queries or keys as the model does.

        Args:
            x: (…, length, head_dim).
            positions: (length,), or what broadcasts to x without its last axis.

        Returns:
            The rotated ones, of the same shape.

        Example:
            >>> rotary = layer_positions(model)[0].rotary
            >>> rotary.apply(torch.randn(4, 10, rotary.head_dim), torch.arange(10))
        """
        if x.shape[-1] != self.head_dim:
            raise ValueError(f"the heads of this layer have {self.head_dim} dimensions, not {x.shape[-1]}.")
        exact = torch.promote_types(x.dtype, torch.float32)
        angle = positions.to(exact)[..., None] * self.frequencies.to(x.device, exact)
        cos, sin = angle.cos() * self.factor, angle.sin() * self.factor
        turned = turn_pairs(x[..., self.start :].to(exact), cos, sin, self.layout)
        return torch.cat([x[..., : self.start], turned.to(x.dtype)], dim=-1)

    def undo(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate queries or keys back: the inverse of `apply`, with the same arguments."""
        return replace(self, factor=1.0 / self.factor).apply(x, -positions)


@dataclass(frozen=True)
class LayerPosition:
    """Where position lives in one attention layer.

    `bias(length)` has one value per head and distance: (heads, 2·length − 1), at the distances i − j (query minus key)
    from −(length − 1) to length − 1. In causal layers only distances from 0 on occur; where the model adds a value per
    key (ALiBi), the constant per query, which changes no weight, is chosen so that distance 0 has 0. For "table 2-D",
    `bias(window)` is (heads, 2·window − 1, 2·window − 1): the differences of rows and of columns, query minus key, from
    −(window − 1) to window − 1.
    """

    name: str  # of the attention module, as in model.named_modules()
    kind: str  # one of `ACTS_ON`, "relpos" or "unknown"
    words: str  # one line
    rotary: Rotary | None = None
    table: Tensor | None = None  # (positions, width): added to the embedding; row 0 belongs to the first token
    bias: Callable[[int], Tensor] | None = None

    @property
    def title(self) -> str:
        """Its first words, as "RoPE" or "T5 buckets"."""
        return "unknown positions" if self.kind == "unknown" else re.split("[,:]", self.words)[0]

    @property
    def acts_on(self) -> str:
        return ACTS_ON.get(self.kind, "unknown")

    @property
    def bias_by_distance(self) -> Callable[[int], Tensor] | None:
        """`bias`, if it is all that position does in this layer's scores, and a function of the distance alone."""
        return self.bias if self.kind in ("alibi", "buckets") else None


@dataclass(frozen=True)
class ModelLayer:
    """An attention layer, and the models that it is part of."""

    name: str  # in the complete model
    module: Any
    parts: tuple[PreTrainedModel, ...]  # the models of its type around it, from the innermost outward
    stack: str  # name of the innermost one in the complete model; "" for a model of one stack
    index: int  # in the stack; 0 is the first
    cross: bool  # see `is_cross`
    length: int | None  # of the input, for what depends on it

    @property
    def part(self) -> PreTrainedModel:
        return self.parts[0]

    @property
    def config(self) -> Any:
        return self.part.config

    @property
    def model_type(self) -> str:
        return str(self.config.model_type)

    @property
    def layer_type(self) -> str | None:
        """Its entry in the configuration's `layer_types`, as "sliding_attention"."""
        types = getattr(self.config, "layer_types", None)
        number = getattr(self.module, "layer_idx", None)
        return None if not types or number is None or number >= len(types) else str(types[number])

    @property
    def window(self) -> int | None:
        """How many tokens a query sees, itself included, in a causal layer; how many to each side in others."""
        config, kind = self.config, self.layer_type
        if isinstance(self.module, SelfAttention):  # of our own models
            window = layer_encodings(config.position, config.num_hidden_layers)[self.index].get("window")
            return None if window is None else int(window) - (not self.module.causal)  # the token itself counts
        if self.model_type == "gpt_neo":
            return int(config.window_size) if config.attention_layers[self.index] == "local" else None
        slides = getattr(config, "use_sliding_window", True) if kind is None else kind == "sliding_attention"
        if not slides:
            return None
        size = getattr(config, "sliding_window", None)
        if size is None and kind is not None:
            size = getattr(self.module, "sliding_window", None)
        return size if isinstance(size, int) and size > 0 else None

    @property
    def table(self) -> tuple[Tensor, int] | None:
        """The table that is added to the embedding: its rows from the first token's on, and the number of that row.

        OPT and BART have two unused rows at the start (`offset`); RoBERTa-style models have a row for the padding token
        and start after it (`padding_idx`). None if there is no table.
        """
        for part in self.parts:
            for name, module in part.named_modules():
                if name.rpartition(".")[2] in TABLES and isinstance(module, nn.Embedding):
                    first = getattr(module, "offset", 0 if module.padding_idx is None else module.padding_idx + 1)
                    return module.weight[first:].detach(), int(first)
            for name, parameter in part.named_parameters():
                if name.rpartition(".")[2] in TABLES and parameter.dim() == 3:  # (1, positions, width) of images
                    return parameter[0].detach(), 0
        return None

    def position(self, kind: str, words: str, **fields: Any) -> LayerPosition:
        """Its position, with what else changes its scores (windows, softcaps, sinks, norms) added to the words."""
        return LayerPosition(self.name, kind, "; ".join([words, *self._score_changes()]), **fields)

    def _score_changes(self) -> Iterator[str]:
        module, window = self.module, self.window
        if window is not None:
            yield f"window {window:,}" + ("" if getattr(module, "is_causal", True) else " to each side")
        if self.layer_type == "chunked_attention":
            yield f"chunks of {self.config.attention_chunk_size:,} tokens"
        if any(getattr(module, name, None) is not None for name in NORMS):
            yield "q and k normalised" + (" after the rotation" if self.model_type in NORM_LAST else "")
        if softcap := getattr(module, "attn_logit_softcapping", None):
            yield f"softcap {softcap:g}"
        if getattr(module, "sinks", None) is not None:
            yield "a learned sink per head"
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            yield f"temperature by position from {self.config.floor_scale:,} tokens on"


@dataclass(frozen=True)
class Adapter:
    """What relpos knows of the models of some types: their position, and their attention on ours."""

    types: Collection[str] = ()  # model types whose layers `describe` knows
    describe: Callable[[ModelLayer], LayerPosition | None] = lambda layer: None  # None: not the kind of this adapter
    # By file and class: attributes of its instances on ours, functions as methods.
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def words_of_table(rows: Tensor, kind: str = "learned") -> str:
    """A table that is added to the embedding, in words."""
    return f"{kind} positions, {rows.shape[0]:,} × {rows.shape[1]:,}, added to the embedding"


def is_cross(name: str, module: nn.Module) -> bool:
    """Whether the keys of a layer come from another stack, or the query is a learned one that pools all tokens."""
    parts = (*name.split("."), type(module).__name__)
    if isinstance(module, nn.MultiheadAttention) or any(word in part for word in CROSS for part in parts):
        return True
    return bool(getattr(module, "is_cross_attention", False))


def model_layers(model: PreTrainedModel, length: int | None = None) -> list[ModelLayer]:
    """The attention layers of a model, in order, for inputs of a length."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"positions are read from a model of transformers, not from {type(model).__name__}.")
    parts = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    layers = attention_layers(model)
    around = {  # the names of the models around each layer, the innermost first
        layer: sorted((part for part in parts if not part or layer.startswith(f"{part}.")), key=len, reverse=True)
        for layer in layers
    }
    stacks: dict[tuple[str, bool], list[str]] = {}
    for name, module in layers.items():
        stacks.setdefault((around[name][0], is_cross(name, module)), []).append(name)
    several = len({part for part, _ in stacks}) > 1
    ordered = {}
    for (inner, cross), names in stacks.items():
        family, stack = parts[inner].config.model_type, inner.rpartition(".")[2] if several else ""
        for name, number in _numbered(names, inner).items():
            same = tuple(parts[part] for part in around[name] if parts[part].config.model_type == family)
            ordered[name] = ModelLayer(name, layers[name], same, stack, number, cross, length)
    return [ordered[name] for name in layers]


def _numbered(names: list[str], part: str) -> dict[str, int]:
    """The numbers of layers from their names, as in "layers.3.self_attn"; from their order if that is not enough."""
    matches = [re.search(r"\.(\d+)\.", name[len(part) :]) for name in names]
    numbers = [-1 if match is None else int(match[1]) for match in matches]
    unique = len(set(numbers)) == len(numbers) and min(numbers) >= 0
    return dict(zip(names, numbers if unique else range(len(names)), strict=True))
