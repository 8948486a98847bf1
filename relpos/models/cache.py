"""transformers' caches, in each layer of which our models keep a `relpos.Cache`."""

import torch
from torch import Tensor
from transformers import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer

from relpos.attend import Cache


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
