"""BERT with any positional encoding of both directions: an encoder that predicts masked tokens.

Its arithmetic and the names of its weights are BERT's own: with learned positions the two open each other's folders.
"""

from collections.abc import Iterable
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

from relpos.forms.encoding import Encoding
from relpos.model_catalogue import Preset
from relpos.models.attention import SelfAttention, split_heads
from relpos.models.base import RelposModel, Tokens, read_tokens
from relpos.models.family import Family, Output, PositionedConfig
from relpos.models.loss import masked_token_loss
from relpos.models.plan import PositionEntry, Positions


@strict
class RelposBertConfig(PositionedConfig, BertConfig):
    """BERT's configuration with a positional encoding.

    Args:
        position: {"name": "kerple_log", …options}, see `relpos.models.plan`. Default: that of BERT, learned
            positions up to max_position_embeddings.
        share_position: One encoding for all layers instead of one per layer.

    Example:
        >>> config = RelposBertConfig.preset("nano", position="cable", vocab_size=4096)
    """

    model_type, table = "relpos_bert", "max_position_embeddings"

    position: PositionEntry | str | None = None
    share_position: bool = False
    # As in the other families, no dropout unless the configuration asks for it.
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    max_position_embeddings: int = 512  # of learned positions; no other encoding has a limit

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of the {self.num_attention_heads} heads."
            )
        if self.is_decoder or self.add_cross_attention:
            raise ValueError("this BERT is an encoder: leave is_decoder and add_cross_attention at False.")
        if self.hidden_act != "gelu":
            raise ValueError(f"hidden_act is {self.hidden_act!r}, but BERT has gelu only.")


class Embeddings(nn.Module):
    """Tokens and their types, and the positions of an encoding that acts on the embedding; normalised."""

    def __init__(self, config: RelposBertConfig, positions: Positions) -> None:
        super().__init__()
        # Where padding has a token of its own, that token learns no embedding.
        padding = None if config.pad_token_id == config.eos_token_id else config.pad_token_id
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=padding)
        self.position_embeddings = positions.embedding  # under BERT's name
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, token_type_ids: Tensor | None, shared: Encoding | None, tokens: Tokens) -> Tensor:
        types = x.new_zeros(x.shape[:2], dtype=torch.long) if token_type_ids is None else token_type_ids
        x = x + self.token_type_embeddings(types)
        for position in (self.position_embeddings, shared):
            if position is not None:
                x = position.embed(x, documents=tokens.documents)
        out: Tensor = self.dropout(self.LayerNorm(x))
        return out


class Attention(SelfAttention):
    """BERT's projections, in both directions; the output projection belongs to `AddAndNorm`."""

    def __init__(self, config: RelposBertConfig, position: Encoding | None) -> None:
        heads, dropout = config.num_attention_heads, config.attention_probs_dropout_prob
        super().__init__(heads, heads, config.size_of_head, position, causal=False, dropout=dropout)
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (split_heads(linear(x), self.heads) for linear in (self.query, self.key, self.value))
        return q, k, v

    def merge(self, out: Tensor) -> Tensor:
        return out


class AddAndNorm(nn.Module):
    """A linear map, added to the stream, and normalised."""

    def __init__(self, config: RelposBertConfig, inner: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, stream: Tensor) -> Tensor:
        out: Tensor = self.LayerNorm(self.dropout(self.dense(x)) + stream)
        return out


class Block(GradientCheckpointingLayer):
    """Attention and a network of two layers, each followed by a normalisation."""

    def __init__(self, config: RelposBertConfig, position: Encoding | None) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.attention = nn.ModuleDict({"self": Attention(config, position), "output": AddAndNorm(config, width)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, inner)})
        self.output = AddAndNorm(config, inner)

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        x = self.attention["output"](self.attention["self"](x, **call), x)
        out: Tensor = self.output(F.gelu(self.intermediate["dense"](x)), x)
        return out


class _Weights:
    """What the models with and without the head share."""

    config_class = RelposBertConfig
    base_model_prefix = "bert"
    _input_embed_layer = "word_embeddings"
    _no_split_modules = ["Block"]
    _keys_to_ignore_on_load_unexpected = [r"pooler\.", r"cls\.seq_relationship\."]  # of BERT's second task


class RelposBertModel(_Weights, RelposModel):
    """Token ids to hidden states."""

    _keys_to_ignore_on_load_unexpected = [*_Weights._keys_to_ignore_on_load_unexpected, r"^cls\."]

    def __init__(self, config: RelposBertConfig) -> None:
        super().__init__(config)
        positions = config.make_positions()
        self.embeddings = Embeddings(config, positions)
        self.position = positions.shared
        blocks = [Block(config, own) for own in positions.layers]
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(blocks)})
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        documents: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Hidden states of input_ids, or of inputs_embeds.

        The arguments are those of transformers' BERT, and one more: `documents` (batch, length), ids of packed
        documents, between which there is no attention. Positions follow from the order of the tokens, so other
        position_ids are refused. The length is limited only by the encoding.
        """
        x = self.embeddings_of(input_ids, inputs_embeds, output_attentions)
        tokens = read_tokens(self, x, attention_mask, documents, position_ids)
        x = self.embeddings(x, token_type_ids, self.position, tokens)
        states = [x]
        blocks: Any = self.encoder["layer"]
        for block in blocks:
            x = block(x, shared=self.position, documents=tokens.documents, padding=tokens.padding)
            states.append(x)
        out = BaseModelOutput(last_hidden_state=x, hidden_states=tuple(states) if output_hidden_states else None)
        return self.result(out, return_dict)


class Predictions(nn.Module):
    """Hidden states to logits: linear, GELU, normalised, then the embedding's matrix and a bias."""

    def __init__(self, config: RelposBertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.transform = nn.ModuleDict(
            {"dense": nn.Linear(width, width), "LayerNorm": nn.LayerNorm(width, eps=config.layer_norm_eps)}
        )
        self.decoder = nn.Linear(width, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))  # also the decoder's, as in transformers

    def states(self, hidden: Tensor) -> Tensor:
        """What the decoder's matrix multiplies: (batch, length, width)."""
        out: Tensor = self.transform["LayerNorm"](F.gelu(self.transform["dense"](hidden)))
        return out


class RelposBertForMaskedLM(_Weights, RelposModel):
    """The masked language model: token ids to logits, or to the loss."""

    accepts_loss_kwargs = True  # Trainer passes num_items_in_batch
    _tied_weights_keys = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }

    def __init__(self, config: RelposBertConfig) -> None:
        super().__init__(config)
        self.bert = RelposBertModel(config)
        self.cls = nn.ModuleDict({"predictions": Predictions(config)})
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        predictions: Any = self.cls["predictions"]
        decoder: nn.Linear = predictions.decoder
        return decoder

    def set_output_embeddings(self, value: nn.Linear) -> None:
        predictions: Any = self.cls["predictions"]
        predictions.decoder, predictions.bias = value, value.bias

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        documents: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_logits: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Logits of every token; with labels, the cross-entropy instead, and the logits only with output_logits.

        Labels are the original tokens where a token is predicted, and −100 elsewhere. The loss is computed for the
        predicted tokens only.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, documents)
        states = self.bert(*inputs, output_hidden_states, output_attentions, return_dict=True)
        head = FAMILY.output(self, states.last_hidden_state)
        loss = logits = None
        if labels is not None:
            loss = masked_token_loss(head.states, head.weight, labels, head.bias, num_items_in_batch)
        if labels is None or output_logits:
            logits = F.linear(head.states, head.weight, head.bias)
        out = MaskedLMOutput(loss=loss, logits=logits, hidden_states=states.hidden_states)
        return self.result(out, return_dict)


class Bert(Family):
    """The family BERT."""

    name = "bert"
    config_class = RelposBertConfig
    model_class = RelposBertForMaskedLM

    def sizes(self, preset: Preset) -> dict[str, int]:
        return {
            "num_hidden_layers": preset.layers,
            "num_attention_heads": preset.heads,
            "hidden_size": preset.width,
            "intermediate_size": 4 * preset.width,
        }

    def dropout(self, share: float) -> dict[str, float]:
        return {"hidden_dropout_prob": share}

    def output(self, model: PreTrainedModel, hidden: Tensor) -> Output:
        predictions: Any = model.cls["predictions"]
        return Output(predictions.states(hidden), predictions.decoder.weight, predictions.decoder.bias)

    def attentions(self, base: Any) -> Iterable[SelfAttention]:
        return (block.attention["self"] for block in base.encoder["layer"])


FAMILY = Bert()
