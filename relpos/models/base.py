"""What the models of all families share: loading saved weights, initialisation, reading their arguments."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel, initialization

from relpos.forms.call import check_documents
from relpos.forms.encoding import Encoding
from relpos.models.cache import make_growing, tokens_seen
from relpos.models.exact import open_exactly
from relpos.models.masks import read_mask, read_position_ids
from relpos.models.plan import start_again


class RelposModel(PreTrainedModel):
    """Base class: a transformers model that uses `relpos.attention`."""

    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]

    @classmethod
    def from_pretrained(cls, folder: Any, *args: Any, **options: Any) -> Any:
        """Open a saved model, as with every transformers model; weights that do not fit the model are refused.

        Raises:
            ValueError: The file cannot be read, or tensors are missing, unknown or of other shapes.
        """
        return open_exactly(super().from_pretrained, folder, *args, **options)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # For code outside transformers it skips modules without weights of their own, but here such modules initialise
        # their children. Loaded weights are safe: `initialization` does not overwrite a tensor that came from a file.
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Encoding):
            # An encoding has its own start values, and the call above has just overwritten its linear layers.
            start = start_again(module)
            for own, fresh in zip(module.parameters(), start.parameters() if start else (), strict=start is not None):
                initialization.copy_(own, fresh)

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """Return the mask unchanged: relpos does not use masks with an entry per query and key."""
        return attention_mask

    def returns_dict(self, return_dict: bool | None) -> bool:
        """Whether a forward pass returns an object with named fields instead of a tuple."""
        return bool(self.config.return_dict if return_dict is None else return_dict)


@dataclass(frozen=True)
class Tokens:
    """Which tokens attend to which, read from the arguments of a forward pass."""

    cache: Cache | None
    documents: Tensor | None  # (batch, total)
    padding: Tensor | None  # (batch, total)
    total: int  # tokens so far, those in the cache included
    use_cache: bool  # whether the cache is returned


def read_tokens(
    model: PreTrainedModel,
    x: Tensor,
    attention_mask: Tensor | None,
    documents: Tensor | None,
    cache: Cache | None,
    use_cache: bool | None,
    position_ids: Tensor | None,
) -> Tokens:
    """Convert the arguments that every transformers model takes to those of `relpos.attention`.

    Args:
        model: The model; its configuration says whether a cache is used by default.
        x: Embeddings of the new tokens (batch, length, width).
        attention_mask: (batch, tokens so far), 1 for tokens that count.
        documents: (batch, tokens so far), ids of packed documents.
        cache: The cache of earlier tokens.
        use_cache: Whether to create a cache if there is none.
        position_ids: (batch, length), of the new tokens.

    Raises:
        ValueError: A shape does not fit, or positions have gaps.
    """
    batch, length, _ = x.shape
    use_cache = (model.config.use_cache and not model.training) if use_cache is None else use_cache
    if cache is None and use_cache:
        cache = DynamicCache(config=model.config)
    make_growing(cache)
    total = tokens_seen(cache) + length
    after_padding, padding = read_mask(attention_mask, batch, total)
    packed = documents is not None
    if documents is not None:
        check_documents(documents, batch, total)
    documents = after_padding if documents is None else documents
    if position_ids is not None:
        documents = read_position_ids(position_ids, documents, packed, attention_mask, batch, length, total)
    return Tokens(cache, documents, padding, total, bool(use_cache))


def check_inputs(input_ids: Tensor | None, inputs_embeds: Tensor | None, output_attentions: bool | None) -> None:
    """Refuse inputs that no relpos model accepts.

    Raises:
        ValueError: Both or neither of input_ids and inputs_embeds are passed, or attention weights are requested.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give either input_ids or inputs_embeds.")
    if output_attentions:
        raise ValueError("attention weights are never materialised: look at them with relpos.scores.")
