"""Causal decoders of any family: token ids to hidden states, and the language model over them."""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from relpos.forms.encoding import Encoding
from relpos.forms.tracing import autocasts
from relpos.models.base import RelposModel, Tokens, read_tokens
from relpos.models.context import Context
from relpos.models.loss import next_token_loss

FEW = 8  # rows


class Decoder(RelposModel):
    """Token ids to hidden states. A family names its modules, under the names that its weights have."""

    position: Encoding | None  # the encoding that all layers share
    context: Context | None = None  # the processes among which sequences are divided
    embedding_position: ClassVar[str]  # the encoding that acts on the token embedding
    embedding_dropout: ClassVar[str | None] = None
    blocks: ClassVar[str]  # the layers: each takes x, `past_key_values` and the arguments of `SelfAttention.forward`
    final_norm: ClassVar[str]

    def embed_positions(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Token embeddings (batch, length, width) with the positions of encodings that act on them."""
        start, documents = tokens.start, tokens.documents
        for position in (getattr(self, self.embedding_position), self.position):
            if position is None or "embedding" not in position.places:
                continue
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
        x = self.embeddings_of(input_ids, inputs_embeds, output_attentions)
        if self.context is not None:
            self.context.check(past_key_values, use_cache, attention_mask, position_ids)
            use_cache = False
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache()
        tokens = read_tokens(self, x, attention_mask, documents, position_ids, past_key_values)
        x = self.embed_positions(x, tokens)
        if self.embedding_dropout is not None:
            x = getattr(self, self.embedding_dropout)(x)
        states = []
        for number, block in enumerate(getattr(self, self.blocks)):
            if output_hidden_states:
                states.append(x)
            x = block(
                x,
                past_key_values=None if tokens.states is None else tokens.states[number],
                shared=self.position,
                documents=tokens.documents,
                padding=tokens.padding,
                context=self.context,
            )
        x = getattr(self, self.final_norm)(x)
        out = BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=(*states, x) if output_hidden_states else None,
        )
        return self.result(out, return_dict)


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
        inputs = (input_ids, attention_mask, documents, past_key_values, inputs_embeds, use_cache)
        outputs = (output_hidden_states, output_attentions, True)
        states = self.base_model(*inputs, *outputs, position_ids=position_ids)
        hidden, head = states.last_hidden_state, self.get_output_embeddings()
        loss = logits = None
        if labels is not None:
            context = getattr(self.base_model, "context", None)
            if context is not None:
                count = context.count(labels, hidden.shape[1])
                num_items_in_batch = count if num_items_in_batch is None else num_items_in_batch
            loss = next_token_loss(hidden, head.weight, labels, num_items_in_batch)
        if labels is None or logits_to_keep is not None:
            kept = slice(-(logits_to_keep or 0), None) if not isinstance(logits_to_keep, Tensor) else logits_to_keep
            logits = logits_of(head, hidden[:, kept])
        out = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=states.past_key_values, hidden_states=states.hidden_states
        )
        return self.result(out, return_dict)


def logits_of(head: nn.Module, hidden: Tensor) -> Tensor:
    """The output layer's values for hidden states (batch, tokens, width): (batch, tokens, vocabulary).

    For few rows in float32 on a CPU, the matrix is multiplied in as many parts as there are threads: PyTorch computes
    such a product with one thread, and several threads read memory faster than one. A hook, or a forward of the
    instance's own (as accelerate's offloading has), must run.
    """
    parts, rows = torch.get_num_threads(), hidden.shape[0] * hidden.shape[1]
    if parts == 1 or not 0 < rows <= FEW or hidden.dtype != torch.float32 or not _is_plain_matrix(head):
        out: Tensor = head(hidden)
        return out
    weight: Any = head.weight
    vocabulary, width = weight.shape
    share = vocabulary // parts
    columns = hidden.reshape(rows, width).t()  # (width, rows)
    divided = torch.bmm(weight[: parts * share].view(parts, share, width), columns.expand(parts, width, rows))
    rest = weight[parts * share :] @ columns  # (fewer rows than threads, rows)
    return torch.cat([divided.flatten(0, 1), rest]).t().reshape(*hidden.shape[:2], vocabulary)


def _is_plain_matrix(head: nn.Module) -> bool:
    """Whether the layer is nothing but a matrix in float32 on a CPU, and no gradient or trace must see the product."""
    if type(head) is not nn.Linear or head.bias is not None or "forward" in vars(head):
        return False
    weight = head.weight
    if head._forward_hooks or head._forward_pre_hooks or not weight.is_contiguous() or weight.device.type != "cpu":
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or autocasts(weight.device):
        return False
    return type(weight) is nn.Parameter and weight.dtype == torch.float32
