"""T5-style models: one learned value per head and bucket of distances, added to the scores.

On ours, their bias is a form in place of the tensor that their layers pass to each other.
The layers call `compute_bias` where they have a table, and make zeros where they have none; both become a
`PositionBias` on the instances. The buckets and the table stay the model's own: we ask its own `compute_bias` for the
bias of one query, which holds all distances, so that gradients reach its parameter.
"""

import inspect
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from relpos.forms.bias import Toeplitz
from relpos.forms.call import Call
from relpos.pretrained.attention_interface import PositionBias
from relpos.pretrained.layer_position import Adapter, LayerPosition, ModelLayer

WITHOUT_TABLE = "_relpos_without_table"


def describe(layer: ModelLayer) -> LayerPosition | None:
    """The buckets of one layer: from its own table, or from the one that the layers of its stack share."""
    words = "scores are not scaled"
    if "Local" in type(layer.module).__name__ or "Transient" in type(layer.module).__name__:
        words += f"; blocks of {layer.module.block_len} tokens and their neighbours"
    return describe_buckets(layer, words)


def describe_buckets(layer: ModelLayer, note: str, table: Tensor | None = None) -> LayerPosition | None:
    """The buckets of a layer of T5's or MPNet's kind; None if its model has no table.

    Args:
        layer: The layer.
        note: Further words.
        table: Rows that are added to the embedding besides.
    """
    owners = [module for module in layer.part.modules() if hasattr(module, "relative_attention_bias")]
    if not owners:
        return None
    owner: Any = layer.module if layer.module in owners else owners[0]
    reach = getattr(owner, "relative_attention_max_distance", 128)  # MPNet has no entry for it
    shared = "one table for all layers" if len(owners) == 1 else "a table per layer"
    words = f"T5 buckets: {owner.relative_attention_bias.num_embeddings}, up to distance {reach:,}; {shared}; {note}"
    return layer.position("buckets", words, table=table, bias=partial(by_distance, owner))


def by_distance(owner: Any, length: int) -> Tensor:
    """The values at the distances −(length − 1) to length − 1: (heads, 2·length − 1)."""
    table = owner.relative_attention_bias
    relative = torch.arange(length - 1, -length, -1, device=table.weight.device)  # key minus query
    if hasattr(owner, "relative_position_bucket"):  # MPNet
        which = owner.relative_position_bucket(relative)
    elif type(owner).__name__ == "UMT5Attention":
        which = owner._relative_position_bucket(relative)
    else:
        which = owner._relative_position_bucket(
            relative,
            bidirectional=not owner.is_decoder,
            num_buckets=owner.relative_attention_num_buckets,
            max_distance=owner.relative_attention_max_distance,
        )
    values: Tensor = table(which).T.detach()
    return values


def is_t5(module: nn.Module) -> bool:
    """Whether a module is an attention layer of T5's kind that calls the interface."""
    method = getattr(type(module), "compute_bias", None)
    if method is None or not hasattr(module, "has_relative_attention_bias"):
        return False
    arguments = list(inspect.signature(method).parameters)
    calls = getattr(type(module).forward, "__code__", None)
    return arguments == ["self", "query_length", "key_length", "device", "past_seen_tokens"] and (
        calls is not None and "get_interface" in calls.co_names
    )


def compute_bias(
    self: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: int | Tensor = 0
) -> PositionBias:
    """In place of the method of this name."""
    start = int(past_seen_tokens)
    if vars(self).get(WITHOUT_TABLE):
        return PositionBias(None, start)

    def bias(call: Call) -> Toeplitz:
        distances = len(call.distances)
        highest = call.lowest + distances - 1
        # A query at `highest` has the keys 0, 1, … at the distances highest, highest − 1, … down to lowest.
        values = type(self).compute_bias(self, 1, distances, device=call.device, past_seen_tokens=highest)
        return Toeplitz(values[0, :, 0].flip(-1).to(call.dtype), call.zero)  # (heads, distances)

    return PositionBias(bias, start)


def apply(model: nn.Module) -> None:
    """Give the layers of T5's kind our bias."""
    for module in model.modules():
        if is_t5(module):
            if not module.has_relative_attention_bias:
                vars(module)[WITHOUT_TABLE] = True
                module.has_relative_attention_bias = True  # type: ignore[assignment]  # it now asks `compute_bias`
            vars(module)["compute_bias"] = MethodType(compute_bias, module)


def undo(model: nn.Module) -> None:
    """Give them back their own."""
    for module in model.modules():
        if "compute_bias" in vars(module):
            del vars(module)["compute_bias"]
            if vars(module).pop(WITHOUT_TABLE, False):
                module.has_relative_attention_bias = False  # type: ignore[assignment]


ADAPTER = Adapter({"longt5", "mt5", "pop2piano", "switch_transformers", "t5", "umt5"}, describe)
