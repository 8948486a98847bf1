"""A family of models, as training, scoring and drawing see it.

Nothing outside this folder and `relpos.pretrained` knows the modules or the weights of a particular model. Other code
asks the model's family to build it, for its hidden states, for what its output matrix multiplies, and for the queries
and keys of its attention layers in order.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from relpos.attend.layer_call import LayerCall
from relpos.forms.encoding import Encoding
from relpos.model_catalogue import FAMILIES, Preset, entry, family_of_type, metric
from relpos.models.attention import SelfAttention
from relpos.models.plan import layer_encodings


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
    """The interface used by scoring and drawing."""

    name: str
    title: str  # the name in text, as in "GPT-2"
    causal: bool  # whether it predicts the next token; otherwise it predicts masked tokens
    predicts_tokens: bool = True  # whether it predicts tokens at all

    @property
    def metric(self) -> str:
        """What evaluation by length measures; see `relpos.model_catalogue.FamilyEntry.metric`."""
        return metric(self.causal)

    def check_scoring(self, model: PreTrainedModel) -> None:
        """Check that losses of tokens can be computed.

        Raises:
            ValueError: The model predicts no tokens, or how is not known.
        """
        if not self.predicts_tokens:
            raise ValueError(
                f"{type(model).__name__} predicts no tokens, so it has no perplexity: give a model with a head for the "
                "next token or for masked tokens."
            )

    @abstractmethod
    def hidden(self, model: PreTrainedModel, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        """Hidden states after the last layer: (batch, length, width).

        Args:
            model: The model.
            ids: Token ids (batch, length).
            documents: (batch, length), ids of packed documents between which there is no attention.
        """

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
        """The queries and keys of some layers on an input.

        Args:
            model: The model.
            ids: Token ids (length,).
            numbers: Numbers of the layers; 1 is the first.

        Raises:
            ValueError: The input of a layer is not finite.
        """

    def calls_without_input(
        self, model: PreTrainedModel, length: int, numbers: Iterable[int]
    ) -> list[LayerCall] | None:
        """The same without running the model, where the bias of these layers is the same for every input.

        Only the bias can be read from them: their queries and keys are 0.

        Args:
            model: The model.
            length: Number of tokens.
            numbers: Numbers of the layers; 1 is the first.

        Returns:
            The calls, or None if the bias of a layer depends on the input.
        """
        return None

    @abstractmethod
    def position_titles(self, model: PreTrainedModel, numbers: Sequence[int]) -> tuple[str, str]:
        """The names of the encodings of some layers and their places; several if layers have different ones."""

    @abstractmethod
    def position_entry(self, model: PreTrainedModel) -> dict[str, Any]:
        """The model's encoding, as JSON, with its `name`."""


class Family(Reader):
    """A family that we can build and train. Each family's file ends with one object of this type, `FAMILY`."""

    config_class: ClassVar[type[PreTrainedConfig]]
    model_class: ClassVar[type[PreTrainedModel]]  # with the head that predicts tokens
    tokenizer: ClassVar[str | None] = None  # used for a published folder without a tokenizer

    @property
    def title(self) -> str:  # type: ignore[override]
        """The family's name in text, as in "GPT-2"."""
        return FAMILIES[self.name].title

    @property
    def causal(self) -> bool:  # type: ignore[override]
        """Whether attention is causal and the model predicts the next token; otherwise it predicts masked tokens."""
        return FAMILIES[self.name].causal

    @abstractmethod
    def sizes(self, preset: Preset) -> dict[str, Any]:
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
        """The configuration of a new model.

        Args:
            preset: Size of the model.
            position: Name and options of the encoding, and a plan by layer; see `relpos.models.plan`.
            vocab_size: Rows of the embedding.
            tokenizer: The configuration takes its special tokens from it.
            share_position: One encoding for all layers.
            dropout: On the embedding and on what each layer adds.
        """
        special = {} if tokenizer is None else {
            name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        }  # fmt: skip
        return self.config_class(
            **self.sizes(preset),
            **self.dropout(dropout),
            **special,
            vocab_size=vocab_size,
            position=dict(position),
            share_position=share_position,
        )

    def dropout(self, share: float) -> dict[str, Any]:
        """The entries of the configuration that set the dropout.

        Args:
            share: Probability that a value is dropped.

        Raises:
            ValueError: The family has no dropout, and the share is not 0.
        """
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
    def layers(self, model: PreTrainedModel) -> list[AttentionLayer]:
        """Its attention layers in order."""

    def depth(self, model: PreTrainedModel) -> int:
        return len(self.layers(model))

    def heads(self, model: PreTrainedModel) -> int:
        return self.layers(model)[0].attention.heads

    def calls(self, model: PreTrainedModel, ids: Tensor, numbers: Iterable[int]) -> list[LayerCall]:
        chosen = {number: self.layers(model)[number - 1] for number in numbers}
        inputs: dict[int, Tensor] = {}

        def keep(number: int) -> Callable[[Any, tuple[Tensor, ...]], None]:
            return lambda module, arguments: inputs.update({number: arguments[0]})

        hooks = [layer.attention.register_forward_pre_hook(keep(number)) for number, layer in chosen.items()]
        try:
            self.hidden(model, ids[None].to(model.device))
        finally:
            for hook in hooks:
                hook.remove()
        calls = []
        for number, layer in chosen.items():
            x = inputs[number]
            check_finite(number, x)
            q, k, _ = layer.attention.project(x)
            calls.append(_call(layer, q, k, hidden=x))
        return calls

    def calls_without_input(
        self, model: PreTrainedModel, length: int, numbers: Iterable[int]
    ) -> list[LayerCall] | None:
        chosen = [self.layers(model)[number - 1] for number in numbers]
        if not all(layer.position is not None and layer.position.static_bias for layer in chosen):
            return None
        nothing = torch.zeros(1, dtype=model.dtype, device=model.device)
        calls = []
        for layer in chosen:
            q = nothing.expand(1, layer.attention.heads, length, layer.attention.head_dim)
            calls.append(_call(layer, q, q))
        return calls

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

    def position_entry(self, model: PreTrainedModel) -> dict[str, Any]:
        return dict(model.config.position)


def _call(layer: AttentionLayer, q: Tensor, k: Tensor, hidden: Tensor | None = None) -> LayerCall:
    own = layer.attention
    return LayerCall(q, k, layer.position, {"hidden": hidden, "causal": own.causal, "scale": own.scale})


def check_finite(number: int, x: Tensor) -> None:
    """Check the input of a layer, or its queries.

    Raises:
        ValueError: It is not finite.
    """
    if not bool(x.isfinite().all()):
        raise ValueError(f"the input of layer {number} is not finite: the model's weights are damaged.")


def get_family(name: str) -> Family:
    """A family by name.

    Raises:
        ValueError: There is no such family.
    """
    entry(name)
    family: Family = importlib.import_module(f"relpos.models.{name}").FAMILY
    return family


def family_of(model: PreTrainedModel) -> Family:
    """The family of a relpos model.

    Raises:
        ValueError: It is not a relpos model.
    """
    name = family_of_type(model.config.model_type)
    if name is None or not isinstance(model, get_family(name).model_class):
        raise ValueError(f"{type(model).__name__} is not a relpos model; the families are {', '.join(FAMILIES)}.")
    return get_family(name)
