"""T5 and its kin: their bucketed bias as a form, in place of the tensor that their layers pass to each other.

The layers call `compute_bias` where they have a table, and make zeros where they have none. Both become a
`PositionBias` on the instances. The buckets and the table stay the model's own: we ask its own `compute_bias` for the
bias of one query, which holds all distances, so that gradients reach its parameter.
"""

import inspect
from types import MethodType
from typing import Any

from torch import Tensor, nn

from relpos.forms.bias import Toeplitz
from relpos.forms.call import Call
from relpos.pretrained.interface import PositionBias

WITHOUT_TABLE = "_relpos_without_table"


def is_t5(module: nn.Module) -> bool:
    """Whether a module is an attention layer of T5's kind that calls the interface."""
    theirs = getattr(type(module), "compute_bias", None)
    if theirs is None or not hasattr(module, "has_relative_attention_bias"):
        return False
    arguments = list(inspect.signature(theirs).parameters)
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
