"""What the models of all families share: initialisation, caches, and reading the arguments of a forward pass."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache as TransformersCache
from transformers import PreTrainedModel, initialization
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer

from relpos.attend import Cache
from relpos.forms.call import check_documents, positions
from relpos.forms.encoding import Encoding
from relpos.models.plan import start_again
from relpos.models.saved import open_exactly


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

    def embeddings_of(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, output_attentions: bool | None
    ) -> Tensor:
        """The token embeddings (batch, length, width) of one of the two inputs."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds.")
        if output_attentions:
            raise ValueError("attention weights are never materialised: look at them with relpos.scores.")
        embedded: Tensor = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        return embedded

    def result(self, out: Any, return_dict: bool | None) -> Any:
        """The output of a forward pass, as an object with named fields or as a tuple."""
        return out if (self.config.return_dict if return_dict is None else return_dict) else out.to_tuple()


@dataclass(frozen=True)
class Tokens:
    """Which tokens attend to which, read from the arguments of a forward pass."""

    start: int  # tokens in the cache
    documents: Tensor | None  # (batch, tokens so far)
    padding: Tensor | None  # (batch, tokens so far)
    states: list[Cache] | None  # of the layers, in the cache


def read_tokens(
    model: PreTrainedModel,
    x: Tensor,
    attention_mask: Tensor | None,
    documents: Tensor | None,
    position_ids: Tensor | None,
    cache: TransformersCache | None = None,
) -> Tokens:
    """Convert the arguments that every transformers model takes to those of `relpos.attention`.

    The embeddings x (batch, length, width) and position_ids (batch, length) are of the new tokens; attention_mask (1
    for tokens that count) and documents (ids of packed documents) of the tokens so far, (batch, total).
    """
    batch, length, _ = x.shape
    states = None if cache is None else decoding_states(cache, model.config.num_hidden_layers)
    start = states[0].length if states else 0
    after_padding, padding = read_mask(attention_mask, batch, start + length)
    packed = documents is not None
    if documents is not None:
        check_documents(documents, batch, start + length)
    documents = after_padding if documents is None else documents
    if position_ids is not None:
        documents = read_position_ids(position_ids, documents, packed, attention_mask, batch, length, start + length)
    return Tokens(start, documents, padding, states)


def read_mask(mask: Tensor | None, batch: int, total: int) -> tuple[Tensor | None, Tensor | None]:
    """Convert a mask (batch, total), 1 for tokens that count, to `documents` and `padding` of `relpos.attention`.

    Padding on the left becomes a document of its own, so that the text begins at position 0 and every encoding gives
    the same result as without padding. Other masked tokens are hidden and do not change the positions of the rest.
    """
    if mask is None:
        return None, None
    if mask.shape != (batch, total):
        raise ValueError(
            f"attention_mask must be (batch, tokens so far) = ({batch}, {total}), not {tuple(mask.shape)}."
        )
    mask = mask.bool()
    if bool(mask.all()):
        return None, None
    begun = mask.cumsum(dim=1) > 0
    hidden = begun & ~mask
    return (None if bool(begun.all()) else begun.long()), (~hidden if bool(hidden.any()) else None)


def read_position_ids(
    position_ids: Tensor,
    documents: Tensor | None,
    packed: bool,
    mask: Tensor | None,
    batch: int,
    length: int,
    total: int,
) -> Tensor | None:
    """Check position_ids of the new tokens, (batch or 1, length) or (length,), and return the documents they describe.

    In relpos, positions follow from the order of the tokens: they continue from the cache and restart at 0 where a
    document begins. An encoding of distances cannot represent other positions, so they are refused. While compiling,
    values cannot be read: documents are computed from the ids without the check. `documents` (batch, total) are those
    of padding on the left or, if `packed`, of the user; where the mask is 0, a position is ignored.
    """
    if position_ids.is_floating_point() or position_ids.is_complex() or position_ids.dtype == torch.bool:
        raise TypeError(f"position_ids must be integers, not {position_ids.dtype}.")
    ids = (position_ids[None] if position_ids.dim() == 1 else position_ids).long()
    if ids.shape not in ((batch, length), (1, length)):
        raise ValueError(
            f"position_ids must be (batch, new tokens) = ({batch}, {length}), or one row for all, "
            f"not of shape {tuple(position_ids.shape)}."
        )
    seen = total - length
    looking = not torch.compiler.is_compiling()
    if documents is None and looking and torch.equal(ids, torch.arange(seen, total, device=ids.device).expand_as(ids)):
        return None  # the usual case: a single document
    ids = ids.expand(batch, length)
    counted = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[:, seen:].bool()
    if not packed:
        before = ids.new_zeros(batch, seen) if documents is None else documents[:, :seen]
        last = before[:, -1:] if seen else ids.new_zeros(batch, 1)
        documents = torch.cat([before, last + ((ids == 0) & counted).cumsum(dim=1)], dim=1)
    if looking:
        expected = positions(total, documents, ids.device)[:, seen:].expand_as(ids)
        wrong = ((ids != expected) & counted).nonzero()
        if len(wrong):
            row, token = wrong[0].tolist()
            raise ValueError(
                f"position_ids have {int(ids[row, token])} at row {row}, token {token}, where "
                f"{int(expected[row, token])} is expected: positions continue from the {seen} tokens in the cache, "
                "without gaps, and restart at 0 where a document begins. Leave position_ids out, or pass documents= if "
                "packed documents were cached."
            )
    return documents


class DecodingLayer(CacheLayerMixin):
    """A layer of a transformers cache that is a `relpos.Cache`: `generate` crops and reorders it as any other."""

    is_sliding = False
    is_croppable = True

    def __init__(self) -> None:  # the base class would set keys and values, which are properties here
        self.state = Cache()

    @property
    def keys(self) -> Tensor | None:
        return self.state.tensor("k")

    @property
    def values(self) -> Tensor | None:
        return self.state.tensor("v")

    @property
    def is_initialized(self) -> bool:
        return self.state.length > 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        raise TypeError("tokens are added to this cache by relpos.attention(…, cache=layer.state).")

    def get_seq_length(self) -> int:
        return self.state.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.state.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state.reset()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:  # negative; otherwise, as older versions of transformers pass it, the tokens to keep
            self.state.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.state.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.state.reorder(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.keys is not None:
            self.state.reorder(torch.arange(len(self.keys)).repeat_interleave(repeats))


def decoding_states(cache: TransformersCache, layers: int) -> list[Cache]:
    """The decoding states of a model's layers in a cache, whose unused layers are replaced by ours."""
    if getattr(cache, "offloading", False):
        raise ValueError("relpos keeps keys and values on the model's device: pass a cache without offloading.")
    if cache.layer_class_to_replicate is not None:
        cache.layer_class_to_replicate = DecodingLayer
        cache.layers.extend(DecodingLayer() for _ in range(layers - len(cache.layers)))
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, DecodingLayer):
            continue
        if type(layer) not in (DynamicLayer, StaticLayer) or int(layer.get_seq_length()):
            raise ValueError(
                f"layer {number} of the {type(cache).__name__} is a {type(layer).__name__} with "
                f"{int(layer.get_seq_length())} tokens: pass an empty DynamicCache or StaticCache, or leave "
                "past_key_values out."
            )
        cache.layers[number] = DecodingLayer()
    return [layer.state for layer in cache.layers[:layers]]
