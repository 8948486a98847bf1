"""GPT-2 with any positional encoding: a transformers model like any other.

Its arithmetic and the names of its weights are GPT-2's own: with learned positions the two open each other's folders.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel, initialization
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.pytorch_utils import Conv1D

from relpos.attend import attention
from relpos.encodings.encoding import Encoding
from relpos.models.cache import remember, seen
from relpos.models.exact import open_exactly
from relpos.models.gpt2_config import RelposGPT2Config
from relpos.models.loss import next_token_loss
from relpos.models.padding import read_mask
from relpos.models.position_ids import read_position_ids


class Attention(nn.Module):
    """Causal attention with the layer's own encoding, or with the one that is shared."""

    def __init__(self, config: RelposGPT2Config, layer: int, position: Encoding | None) -> None:
        super().__init__()
        self.heads, self.head_dim, self.layer = config.n_head, config.head_dim, layer
        self.scale = config.head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1
        self.dropped = float(config.attn_pdrop)
        self.c_attn = Conv1D(3 * config.n_embd, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)
        self.drop = nn.Dropout(config.resid_pdrop)
        self.position = position

    def forward(
        self,
        x: Tensor,
        shared: Encoding | None,
        cache: Cache | None,
        documents: Tensor | None,
        padding: Tensor | None,
        total: int,
    ) -> Tensor:
        if self.training and self.dropped:
            raise ValueError(
                f"attention weights are never written out, so none can be dropped, and attn_pdrop is {self.dropped}: "
                "set it to 0 to train (from_pretrained(folder, attn_pdrop=0.0))."
            )
        batch, length, width = x.shape
        position = self.position if shared is None else shared
        q, k, v = self.project(x)
        gates = None if position is None else position.gates(x)
        if cache is not None:
            k, v, gates = remember(cache, self.layer, k, v, gates, total)
        out = attention(q, k, v, position, gates=gates, documents=documents, padding=padding, scale=self.scale)
        dropped: Tensor = self.drop(self.c_proj(out.transpose(1, 2).reshape(batch, length, width)))
        return dropped

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the normalised input x: each (batch, heads, length, head_dim), unrotated."""
        batch, length, _ = x.shape
        q, k, v = self.c_attn(x).view(batch, length, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        return q, k, v


class MLP(nn.Module):
    """Linear, GELU (the tanh formula), linear."""

    def __init__(self, config: RelposGPT2Config) -> None:
        super().__init__()
        if config.activation_function not in ("gelu_new", "gelu_pytorch_tanh"):
            raise ValueError(
                f"activation_function is {config.activation_function!r}, but GPT-2 has gelu_new (GELU by tanh) only."
            )
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = Conv1D(inner, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, inner)
        self.drop = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))
        return out


class Block(GradientCheckpointingLayer):
    """Pre-norm attention and MLP, each added to the stream."""

    def __init__(self, config: RelposGPT2Config, layer: int, position: Encoding | None) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config, layer, position)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, past_key_values: Cache | None = None, **call: Any) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache=past_key_values, **call)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class RelposGPT2PreTrainedModel(PreTrainedModel):
    """What the model with and without its head have in common: start values, and what transformers wants to know."""

    config_class = RelposGPT2Config
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _skip_keys_device_placement = ["past_key_values"]
    _keys_to_ignore_on_load_unexpected = [r"\.attn\.(masked_)?bias$"]  # masks in old GPT-2 files

    @classmethod
    def from_pretrained(cls, folder: Any, *args: Any, **options: Any) -> Any:
        """Open a saved model, as of every transformers model; a file that does not fit it is refused.

        Raises:
            ValueError: the file cannot be read, or lacks tensors, or has others, or has them in other shapes.
        """
        return open_exactly(super().from_pretrained, folder, *args, **options)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # For code outside transformers it skips modules without weights of their own, and those here speak for their
        # children. What has been loaded is safe: `initialization` writes on no tensor that came from a file.
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, Conv1D):
            initialization.normal_(module.weight, std=std)
            initialization.zeros_(module.bias)
        if isinstance(module, Attention | MLP):
            initialization.normal_(module.c_proj.weight, std=std * (2 * self.config.n_layer) ** -0.5)
        for position in (getattr(module, "position", None), getattr(module, "wpe", None)):
            if isinstance(position, Encoding):
                # An encoding knows its own start; the rule above has just written over its linear layers.
                start = self.config.make_position()
                for own, fresh in zip(position.parameters(), start.parameters(), strict=True):
                    initialization.copy_(own, fresh)

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """The mask as it is: attention here never takes one written out for every query and key."""
        return attention_mask


class RelposGPT2Model(RelposGPT2PreTrainedModel):
    """Token ids to hidden states."""

    _keys_to_ignore_on_load_unexpected = [
        *RelposGPT2PreTrainedModel._keys_to_ignore_on_load_unexpected,
        r"^lm_head\.weight$",  # of the language model's folder: this model is the part without it
    ]

    def __init__(self, config: RelposGPT2Config) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        position = config.make_position()
        embeds = position.places == ("embedding",)
        if "embedding" in position.places and not embeds and not config.share_position:
            raise ValueError(
                f"the encoding {config.position} has a part that acts on the embedding, once and not in every "
                "layer: set share_position=True."
            )
        self.wpe = position if embeds else None  # under GPT-2's name
        self.position = position if config.share_position and not embeds else None
        own = not embeds and not config.share_position
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(
            [Block(config, layer, config.make_position() if own else None) for layer in range(config.n_layer)]
        )
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.wte

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.wte = value

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

        documents (batch, tokens so far), ids of packed documents: no attention across them. position_ids
        (batch, length) may say the same by starting again at 0. Positions here are the order of the tokens, so other
        position_ids are refused. The other arguments are those of every transformers decoder. There is no limit of
        length but the encoding's own.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of the two.")
        if output_attentions:
            raise ValueError("attention weights are never written out: look at them with relpos.scores.")
        x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds  # (batch, length, width)
        batch, length, _ = x.shape
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache(config=self.config)
        total = seen(past_key_values) + length
        standing, padding = read_mask(attention_mask, batch, total)
        packed = documents is not None
        documents = standing if documents is None else documents
        if position_ids is not None:
            documents = read_position_ids(position_ids, documents, packed, attention_mask, batch, length, total)
        for position in (self.wpe, self.position):
            if position is not None:
                x = position.embed(x, start=total - length, documents=documents)
        x = self.drop(x)
        call = {"shared": self.position, "documents": documents, "padding": padding, "total": total}
        states = []
        for block in self.h:
            if output_hidden_states:
                states.append(x)
            x = block(x, past_key_values=past_key_values, **call)
        x = self.ln_f(x)
        out = BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=(*states, x) if output_hidden_states else None,
        )
        return out if self._as_dict(return_dict) else out.to_tuple()

    def _as_dict(self, return_dict: bool | None) -> bool:
        return bool(self.config.return_dict if return_dict is None else return_dict)


class RelposGPT2ForCausalLM(RelposGPT2PreTrainedModel, GenerationMixin):
    """The language model: token ids to logits, or to the loss."""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}
    accepts_loss_kwargs = True  # Trainer gives num_items_in_batch

    def __init__(self, config: RelposGPT2Config) -> None:
        super().__init__(config)
        self.transformer = RelposGPT2Model(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.lm_head = value

    def _prepare_position_ids_for_generation(self, *_: Any) -> None:
        # generate would make them up from the mask: those it finds are ours anyway, and checking costs at every step.
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
        """Logits of the next token; with labels their cross-entropy instead.

        Labels are the input ids, shifted here, −100 where nothing is predicted; with one more at the end, the token
        after the last is predicted too.

        The loss is computed in chunks, so that no length × vocabulary tensor exists; logits come with it only when
        asked for: logits_to_keep is how many of the last positions have them (0: all), or their indices.
        """
        if labels is not None and use_cache is None:
            use_cache = False
        found = self.transformer(
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
        hidden = found.last_hidden_state
        loss = logits = None
        if labels is not None:
            loss = next_token_loss(hidden, self.lm_head.weight, labels, num_items_in_batch)
        if labels is None or logits_to_keep is not None:
            kept = slice(-(logits_to_keep or 0), None) if not isinstance(logits_to_keep, Tensor) else logits_to_keep
            logits = self.lm_head(hidden[:, kept])
        out = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=found.past_key_values, hidden_states=found.hidden_states
        )
        return out if self.transformer._as_dict(return_dict) else out.to_tuple()
