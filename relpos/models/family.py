"""A family of models, as training, scoring and drawing see it.

Nothing outside this folder knows the modules or the weights of a particular model. Other code asks the model's family
to build it, for its hidden states, for what its output matrix multiplies, and for its attention layers in order.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from relpos.encodings.encoding import Encoding
from relpos.models.attention import SelfAttention
from relpos.models.presets import Preset
from relpos.models.registry import FAMILIES, entry, family_of_type


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a model."""

    attention: SelfAttention  # with `project`, `scale`, `heads`; its forward receives the layer's input first
    position: Encoding | None  # the encoding that acts in it: its own, or the one that all layers share


@dataclass(frozen=True)
class Output:
    """What turns hidden states into logits: logits = states · weightᵀ + bias."""

    states: Tensor  # (batch, length, width)
    weight: Tensor  # (vocabulary, width)
    bias: Tensor | None = None  # (vocabulary,)


class Family(ABC):
    """The interface of a family. Each family's file ends with one object of this type, `FAMILY`."""

    name: ClassVar[str]
    config_class: ClassVar[type[PreTrainedConfig]]
    model_class: ClassVar[type[PreTrainedModel]]  # with the head that predicts tokens
    tokenizer: ClassVar[str | None] = None  # used for a published folder without a tokenizer

    @property
    def title(self) -> str:
        """The family's name in text, as in "GPT-2"."""
        return FAMILIES[self.name].title

    @property
    def causal(self) -> bool:
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
            position: Name and options of the encoding, and a plan by layer; see `relpos.models.positions`.
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
        """Hidden states after the last layer: (batch, length, width).

        Args:
            model: A model of this family.
            ids: Token ids (batch, length).
            documents: (batch, length), ids of packed documents between which there is no attention.
        """
        options = {"use_cache": False} if self.causal else {}
        states: Tensor = model.base_model(ids, documents=documents, **options).last_hidden_state
        return states

    def output(self, model: PreTrainedModel, hidden: Tensor) -> Output:
        """What the output matrix multiplies, for hidden states (batch, length, width)."""
        head: Any = model.get_output_embeddings()
        return Output(hidden, head.weight, head.bias)

    @abstractmethod
    def layers(self, model: PreTrainedModel) -> list[AttentionLayer]:
        """Its attention layers in order."""


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
