"""A family of models, as training, scoring and drawing see it.

Nothing outside this folder and `relpos.pretrained` knows the modules or the weights of a particular model. Other code
asks the model's family to build it, for its hidden states, for what its output matrix multiplies, and for the queries
and keys of its attention layers in order.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from relpos.attend.arguments import LayerCall
from relpos.forms.encoding import Encoding
from relpos.model_catalogue import FAMILIES, PREFIX, Preset, entry, family_of_type, metric, preset
from relpos.models.attention import SelfAttention
from relpos.models.plan import (
    PositionEntry,
    Positions,
    layer_encodings,
    make_encoding,
    make_positions,
    read_position,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig as _Config
else:
    _Config = object


class PositionedConfig(_Config):
    """A configuration with the entries `position` and `share_position`; see `relpos.models.plan`.

    A family's configuration derives from this class and from transformers' own, and declares the two entries.
    """

    position: PositionEntry | str | None
    share_position: bool
    table: ClassVar[str] = ""  # the entry in which transformers' own model has the size of its learned table, if it has

    def __post_init__(self, auto_map: object = None, **kwargs: Any) -> None:
        # auto_map names a module in the folder of a run, for people without relpos. It is dropped here, because a copy
        # saved elsewhere would name a file that does not exist there.
        super().__post_init__(**kwargs)
        self.position = read_position(self.position, self.own_position())
        if self.table and self.position["name"] == "learned":
            self.position = {"length": getattr(self, self.table), **self.position}
            setattr(self, self.table, self.position["length"])

    def own_position(self) -> PositionEntry:
        """The encoding of transformers' own model, which is the default."""
        return {"name": "learned", "length": getattr(self, self.table)}

    @classmethod
    def preset(cls, name: str, **entries: Any) -> Self:
        """Return the configuration of a named size.

        Args:
            name: pico, nano, tiny, small, medium or large (`relpos.models.PRESETS`).
            **entries: Further entries, as `vocab_size` and `position`; they win over those of the size.

        Returns:
            The configuration.

        Raises:
            ValueError: There is no such size.

        Example:
            >>> RelposGPT2Config.preset("nano", vocab_size=4096, position={"name": "fire", "length": 512})
        """
        return cls(**{**get_family(cls.model_type.removeprefix(PREFIX)).sizes(preset(name)), **entries})

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a configuration; that of transformers' own model is read as a relpos model with the same encoding."""
        entries, rest = super().get_config_dict(*args, **kwargs)
        if entries.get("model_type") == cls.model_type.removeprefix(PREFIX):
            entries = {**entries, "model_type": cls.model_type}
        return entries, rest

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: transformers would copy the source of the class into every saved folder."""

    @property
    def size_of_head(self) -> int:
        """Size of a head."""
        own = getattr(self, "head_dim", None)
        return int(own or self.hidden_size // self.num_attention_heads)

    def make_positions(self) -> Positions:
        """New encodings for all of a model."""
        assert isinstance(self.position, dict)
        return make_positions(self.position, self.share_position, self.num_hidden_layers, *self._sizes())

    def make_position(self, layer: int = 1) -> Encoding:
        """A new encoding like that of one layer; 1 is the first."""
        assert isinstance(self.position, dict)
        return make_encoding(layer_encodings(self.position, self.num_hidden_layers)[layer - 1], *self._sizes())

    def _sizes(self) -> tuple[int, int, int]:
        return self.num_attention_heads, self.size_of_head, self.hidden_size


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a model."""

    attention: SelfAttention  # with `project`, `scale`, `heads`; its forward receives the layer's input first
    position: Encoding | None  # the encoding that acts in it: its own, or the one that all layers share


@dataclass(frozen=True)
class Output:
    """What turns hidden states into logits: logits = states · weightᵀ + bias, then softcap · tanh(logits / softcap)."""

    states: Tensor  # (batch, length, width)
    weight: Tensor  # (vocabulary, width)
    bias: Tensor | None = None  # (vocabulary,)
    softcap: float | None = None


class Reader(ABC):
    """The interface used by scoring and drawing. Layers are counted from 1."""

    name: str
    title: str  # the name in text, as in "GPT-2"
    causal: bool  # whether it predicts the next token; otherwise it predicts masked tokens
    predicts_tokens: bool = True  # whether it predicts tokens at all

    @property
    def metric(self) -> str:
        """What evaluation by length measures; see `relpos.model_catalogue.metric`."""
        return metric(self.causal)

    def check_scoring(self, model: PreTrainedModel) -> None:
        """Check that losses of tokens can be computed."""
        if not self.predicts_tokens:
            raise ValueError(
                f"{type(model).__name__} predicts no tokens, so it has no perplexity: give a model with a head for the "
                "next token or for masked tokens."
            )

    @abstractmethod
    def hidden(self, model: PreTrainedModel, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        """Hidden states after the last layer, (batch, length, width), of ids and packed documents (batch, length)."""

    @abstractmethod
    def output(self, model: PreTrainedModel, hidden: Tensor) -> Output:
        """What the output matrix multiplies, for hidden states (batch, length, width)."""

    @abstractmethod
    def depth(self, model: PreTrainedModel) -> int:
        """Number of its attention layers."""

    @abstractmethod
    def heads(self, model: PreTrainedModel) -> int:
        """Number of heads of its first attention layer."""

    @abstractmethod
    def calls(self, model: PreTrainedModel, ids: Tensor, numbers: Iterable[int]) -> list[LayerCall]:
        """The queries and keys of the layers with these numbers on the input ids (length,)."""

    def calls_without_input(
        self, model: PreTrainedModel, length: int, numbers: Iterable[int]
    ) -> list[LayerCall] | None:
        """The same without running the model, for their bias alone; None if it depends on the input."""
        return None

    @abstractmethod
    def position_titles(self, model: PreTrainedModel, numbers: Sequence[int]) -> tuple[str, str]:
        """The names of the encodings of some layers and their places; several if layers have different ones."""

    @abstractmethod
    def position_entry(self, model: PreTrainedModel) -> PositionEntry:
        """The model's encoding, as JSON, with its `name`."""


class Family(Reader):
    """A family that we can build and train. Each family's file ends with one object of this type, `FAMILY`."""

    config_class: ClassVar[type[PreTrainedConfig]]
    model_class: ClassVar[type[PreTrainedModel]]  # with the head that predicts tokens
    tokenizer: ClassVar[str | None] = None  # used for a published folder without a tokenizer

    def __init__(self) -> None:
        self.title, self.causal = FAMILIES[self.name].title, FAMILIES[self.name].causal

    @abstractmethod
    def sizes(self, preset: Preset) -> dict[str, int]:
        """The entries of the configuration for a preset."""

    def config(
        self,
        preset: Preset,
        position: Mapping[str, Any],
        *,
        vocab_size: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        share_position: bool = False,
        dropout: float = 0.0,
    ) -> PreTrainedConfig:
        """The configuration of a new model, with the special tokens of the tokenizer."""
        special = {} if tokenizer is None else {
            name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        }  # fmt: skip
        return self.config_class(
            **self.sizes(preset),
            **self.dropout(dropout),
            **special,
            vocab_size=vocab_size,
            initializer_range=preset.initializer_range,
            position=dict(position),
            share_position=share_position,
        )

    def dropout(self, share: float) -> dict[str, float]:
        """The entries of the configuration that set the dropout, on the embedding and on what each layer adds."""
        if share:
            raise ValueError(f"{self.title} has no dropout: leave model.dropout at 0, not {share}.")
        return {}

    def hidden(self, model: PreTrainedModel, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        options = {"use_cache": False} if self.causal else {}
        states: Tensor = model.base_model(ids, documents=documents, **options).last_hidden_state
        return states

    def output(self, model: PreTrainedModel, hidden: Tensor) -> Output:
        head: Any = model.get_output_embeddings()
        return Output(hidden, head.weight, head.bias)

    @abstractmethod
    def attentions(self, base: Any) -> Iterable[SelfAttention]:
        """The attention modules of a model without its head, in order."""

    def layers(self, model: PreTrainedModel) -> list[AttentionLayer]:
        """Its attention layers in order."""
        base: Any = model.base_model
        return [
            AttentionLayer(own, own.position if base.position is None else base.position)
            for own in self.attentions(base)
        ]

    def depth(self, model: PreTrainedModel) -> int:
        return len(self.layers(model))

    def heads(self, model: PreTrainedModel) -> int:
        return self.layers(model)[0].attention.heads

    def calls(self, model: PreTrainedModel, ids: Tensor, numbers: Iterable[int]) -> list[LayerCall]:
        chosen = {number: self.layers(model)[number - 1] for number in numbers}
        inputs: dict[int, Tensor] = {}

        def keep(number: int, module: object, arguments: tuple[Tensor, ...]) -> None:
            inputs[number] = arguments[0]

        hooks = [layer.attention.register_forward_pre_hook(partial(keep, number)) for number, layer in chosen.items()]
        try:
            self.hidden(model, ids[None].to(model.device))
        finally:
            for hook in hooks:
                hook.remove()
        calls = []
        for number, layer in chosen.items():
            check_finite(number, inputs[number])
            q, k, _ = layer.attention.project(inputs[number])
            calls.append(_call(layer, q, k, hidden=inputs[number]))
        return calls

    def calls_without_input(
        self, model: PreTrainedModel, length: int, numbers: Iterable[int]
    ) -> list[LayerCall] | None:
        chosen = [self.layers(model)[number - 1] for number in numbers]
        if not all(layer.position is not None and layer.position.static_bias for layer in chosen):
            return None
        nothing = torch.zeros(1, dtype=model.dtype, device=model.device)
        sizes = [(1, layer.attention.heads, length, layer.attention.head_dim) for layer in chosen]
        return [
            _call(layer, nothing.expand(size), nothing.expand(size)) for layer, size in zip(chosen, sizes, strict=True)
        ]

    def position_titles(self, model: PreTrainedModel, numbers: Sequence[int]) -> tuple[str, str]:
        config: Any = model.config
        rows = layer_encodings(config.position, config.num_hidden_layers)
        windows = {number: rows[number - 1].get("window") for number in numbers}
        names = dict.fromkeys(
            rows[number - 1]["name"] + (f" in a window of {window}" if window else "")
            for number, window in windows.items()
        )
        places = dict.fromkeys(config.make_position(number).place for number in numbers)
        return " / ".join(names), " / ".join(places)

    def position_entry(self, model: PreTrainedModel) -> PositionEntry:
        return dict(model.config.position)


def _call(layer: AttentionLayer, q: Tensor, k: Tensor, hidden: Tensor | None = None) -> LayerCall:
    own = layer.attention
    return LayerCall(q, k, layer.position, {"hidden": hidden, "causal": own.causal, "scale": own.scale})


def check_finite(number: int, x: Tensor) -> None:
    """Refuse the input of a layer, or its queries, if it is not finite."""
    if not bool(x.isfinite().all()):
        raise ValueError(f"the input of layer {number} is not finite: the model's weights are damaged.")


def get_family(name: str) -> Family:
    """A family by name."""
    entry(name)
    family: Family = importlib.import_module(f"relpos.models.{name}").FAMILY
    return family


def family_of(model: PreTrainedModel) -> Family:
    """The family of a relpos model."""
    name = family_of_type(model.config.model_type)
    if name is None or not isinstance(model, get_family(name).model_class):
        raise ValueError(f"{type(model).__name__} is not a relpos model; the families are {', '.join(FAMILIES)}.")
    return get_family(name)
