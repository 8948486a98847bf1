"""Causal decoders of any family: token ids to hidden states, and the language model over them."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import Cache, GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from relpos.attend.cache import new_positions
from relpos.forms.encoding import Encoding
from relpos.models.base import RelposModel, Tokens, check_inputs, read_tokens
from relpos.models.context import Context
from relpos.models.logits import logits_of
from relpos.models.loss import next_token_loss


class Decoder(RelposModel):
    """Token ids to hidden states. A family overrides the methods that return its modules."""

    position: Encoding | None  # the encoding that all layers share
    context: Context | None = None  # the processes among which sequences are divided

    def blocks(self) -> Iterable[nn.Module]:
        """The layers in order; each takes x, `past_key_values` and the arguments of `SelfAttention.forward`."""
        raise NotImplementedError

    def embedding_position(self) -> Encoding | None:
        """The encoding that acts on the token embedding."""
        raise NotImplementedError

    def embedding_dropout(self, x: Tensor) -> Tensor:
        """Dropout on the embedding, if the family has it."""
        return x

    def final_norm(self, x: Tensor) -> Tensor:
        """The normalisation after the last layer."""
        raise NotImplementedError

    def embed_positions(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Token embeddings (batch, length, width) with the positions of encodings that act on them."""
        acting = [
            position
            for position in (self.embedding_position(), self.position)
            if position is not None and "embedding" in position.places
        ]
        start, documents = tokens.total - x.shape[1], tokens.documents
        for position in acting:
            if self.context is None:
                x = position.embed(x, start=start, documents=documents)
            else:
                start, documents = self.context.place(x.shape[1], tokens.documents)
                x = self.context.refuse_jointly(partial(position.embed, x, start=start, documents=documents))
        return x

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        position_ids: Tensor | None = None,
    ) -> Any:
        """Hidden states of input_ids, or of inputs_embeds.

        The arguments are those of every transformers decoder, and one more: `documents` (batch, tokens so far), ids of
        packed documents, between which there is no attention. `position_ids` (batch, length) that restart at 0 mean
        the same. Positions follow from the order of the tokens, so other position_ids are refused. The length is
        limited only by the encoding.
        """
        check_inputs(input_ids, inputs_embeds, output_attentions)
        if self.context is not None:
            self.context.check(past_key_values, use_cache, attention_mask, position_ids)
            use_cache = False
        x = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds  # (batch, length, width)
        tokens = read_tokens(self, x, attention_mask, documents, past_key_values, use_cache, position_ids)
        x = self.embed_positions(x, tokens)
        x = self.embedding_dropout(x)
        call = {
            "shared": self.position,
            "documents": tokens.documents,
            "padding": tokens.padding,
            "total": tokens.total,
            "positions": new_positions(x.shape[1], tokens.total, tokens.documents, None, x.device),
            "context": self.context,
        }
        states = []
        for block in self.blocks():
            if output_hidden_states:
                states.append(x)
            x = block(x, past_key_values=tokens.cache, **call)
        x = self.final_norm(x)
        out = BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=tokens.cache if tokens.use_cache else None,
            hidden_states=(*states, x) if output_hidden_states else None,
        )
        return out if self.returns_dict(return_dict) else out.to_tuple()


class CausalLM(RelposModel, GenerationMixin):
    """A language model over a decoder: token ids to logits, or to the loss."""

    accepts_loss_kwargs = True  # Trainer passes num_items_in_batch

    def _prepare_position_ids_for_generation(self, *_: Any) -> None:
        # generate would derive them from the mask: they would equal our positions, and checking them takes time at
        # every step.
        return None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        position_ids: Tensor | None = None,
    ) -> Any:
        """Logits of the next token; with labels, the cross-entropy instead.

        Labels are the input ids (they are shifted here), −100 where nothing is predicted. If there is one label more
        than input ids, the last position also predicts a token.

        The loss is computed in chunks, so that no length × vocabulary tensor is materialised. With labels, logits are
        returned only if logits_to_keep is set: the number of last positions that have logits (0: all), or indices.
        """
        if labels is not None and use_cache is None:
            use_cache = False
        states = self.base_model(
            input_ids,
            attention_mask=attention_mask,
            documents=documents,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
            position_ids=position_ids,
        )
        hidden, head = states.last_hidden_state, self.get_output_embeddings()
        loss = logits = None
        context = getattr(self.base_model, "context", None)
        if labels is not None:
            if context is not None:
                if labels.shape[1] != hidden.shape[1] + 1:
                    raise ValueError(
                        f"a slice of {hidden.shape[1]} tokens has {hidden.shape[1] + 1} labels, the last one that of "
                        f"the token after it, not {labels.shape[1]}: relpos.models.context.slice_window cuts them."
                    )
                num_items_in_batch = context.count(labels) if num_items_in_batch is None else num_items_in_batch
            loss = next_token_loss(hidden, head.weight, labels, num_items_in_batch)
        if labels is None or logits_to_keep is not None:
            kept = slice(-(logits_to_keep or 0), None) if not isinstance(logits_to_keep, Tensor) else logits_to_keep
            logits = logits_of(head, hidden[:, kept])
        out = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=states.past_key_values, hidden_states=states.hidden_states
        )
        return out if self.returns_dict(return_dict) else out.to_tuple()
