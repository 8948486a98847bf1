"""What the models of every family have in common: opening saved weights, start values, reading their arguments."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel, initialization

from relpos.encodings.call import check_documents
from relpos.encodings.encoding import Encoding
from relpos.models.cache import tokens_seen
from relpos.models.exact import open_exactly
from relpos.models.padding import read_mask
from relpos.models.position_ids import read_position_ids
from relpos.models.positions import start_again


class RelposModel(PreTrainedModel):
    """A transformers model whose attention is ours."""

    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]

    @classmethod
    def from_pretrained(cls, folder: Any, *args: Any, **options: Any) -> Any:
        """Open a saved model, as with every transformers model; weights that do not fit it are refused.

        Raises:
            ValueError: The file cannot be read, or lacks tensors, or has others, or has them in other shapes.
        """
        return open_exactly(super().from_pretrained, folder, *args, **options)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # For code outside transformers it skips modules without weights of their own, and those here speak for their
        # children. What has been loaded is safe: `initialization` writes on no tensor that came from a file.
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Encoding):
            # An encoding has its own start values; the general rule has just overwritten its linear layers.
            start = start_again(module)
            for own, fresh in zip(module.parameters(), start.parameters() if start else (), strict=start is not None):
                initialization.copy_(own, fresh)

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """The mask as it is: attention here never takes one with an entry per query and key."""
        return attention_mask

    def returns_dict(self, return_dict: bool | None) -> bool:
        """Whether a forward pass returns an object with names, and not a tuple."""
        return bool(self.config.return_dict if return_dict is None else return_dict)


@dataclass(frozen=True)
class Tokens:
    """Who attends to whom, as the arguments of a forward pass say it."""

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
    """Read the arguments that every transformers model takes, as attention here understands them.

    Args:
        model: Whose configuration says whether a cache is used by default.
        x: Embeddings of the new tokens (batch, length, width).
        attention_mask: (batch, tokens so far), 1 for tokens that count.
        documents: (batch, tokens so far), ids of packed documents.
        cache: Of earlier tokens.
        use_cache: Whether to make a cache where there is none.
        position_ids: (batch, length), of the new tokens.

    Raises:
        ValueError: A shape does not fit, or positions have gaps.
    """
    batch, length, _ = x.shape
    use_cache = (model.config.use_cache and not model.training) if use_cache is None else use_cache
    if cache is None and use_cache:
        cache = DynamicCache(config=model.config)
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
    """Refuse inputs that no model here takes.

    Raises:
        ValueError: Both or neither of input_ids and inputs_embeds are there, or attention weights are asked for.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give input_ids or inputs_embeds, one of the two.")
    if output_attentions:
        raise ValueError("attention weights are never materialised: look at them with relpos.scores.")
