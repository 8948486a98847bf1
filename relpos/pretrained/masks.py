"""transformers' mask functions, read as intervals.

transformers describes a mask by a function (batch, head, query, key) -> seen, composed of a few known ones. They are
recognised by their names, and their settings are read from their closures; tests/pretrained/test_use.py notices when
transformers changes them. What is not recognised is evaluated: row by row if the function takes index tensors, else
materialised.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    prepare_padding_mask,
    sdpa_mask,
)

from relpos.forms.call import MaskFunction
from relpos.pretrained.visible import Visible, VisibleMask, traced_mask

ADDITIVE = {"deepseek_v4"}  # model types that join an additive bias to their mask, so that it has to be additive too
DEFAULTS = {"q_offset": 0, "kv_offset": 0, "local_size": None, "use_vmap": False, "device": "cpu"}


def recognise(function: Callable[..., Any]) -> list[tuple[str, dict[str, Any]]] | None:
    """The parts that a mask function is the conjunction of, each by name with its settings.

    Returns:
        ("causal", {}), ("window", {"sliding_window": w}), … in any order, nothing for a mask that hides nothing; None
        if there is a part that is not known.
    """
    if function is causal_mask_function:
        return [("causal", {})]
    if function is bidirectional_mask_function:
        return []
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    settings = inspect.getclosurevars(function).nonlocals
    if function.__qualname__ == "and_masks.<locals>.and_mask":
        parts = [recognise(part) for part in settings["mask_functions"]]
        return None if None in parts else [item for part in parts if part is not None for item in part]
    if function.__qualname__ in KNOWN:
        name, keys = KNOWN[function.__qualname__]
        if keys <= settings.keys():
            return [(name, {key: settings[key] for key in keys})]
    return None


KNOWN = {  # by the name of the function: our name, and the variables of its closure
    "sliding_window_overlay.<locals>.inner_mask": ("window", {"sliding_window"}),
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": ("window of both directions", {"sliding_window"}),
    "chunked_overlay.<locals>.inner_mask": ("chunks", {"chunk_size", "left_padding"}),
    "packed_sequence_mask_function.<locals>.inner_mask": ("documents", {"packed_sequence_mask"}),
    "padding_mask_function.<locals>.inner_mask": ("padding", {"padding_mask"}),
}


def describe(
    parts: list[tuple[str, dict[str, Any]]],
    padding: Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    first_query: int,
    first_key: int,
) -> Visible | None:
    """The recognised parts of a mask as arguments of attention.

    Args:
        parts: From `recognise`.
        padding: (batch, positions), True for tokens that count.
        batch: Rows of the batch.
        queries: Number of queries.
        keys: Number of keys.
        first_query: Position of the first query.
        first_key: Position of the first key: above 0 where a cache has dropped older keys.

    Returns:
        The description, or None where the queries stand before the keys.
    """
    start = first_query - first_key
    if start < 0:
        return None
    far = start + queries + keys  # wider than any distance
    windows = [(far, far)]
    documents: Tensor | None = None
    for name, settings in parts:
        if name == "causal":
            windows.append((far, 0))
        elif name == "window":
            windows.append((settings["sliding_window"] - 1, far))
        elif name == "window of both directions":
            windows.append((settings["sliding_window"],) * 2)
        elif name == "padding":
            padding = settings["padding_mask"].bool() & (True if padding is None else padding)
        else:
            ids = ids_of(settings, first_key, keys)
            # Both kinds of ids never decrease along a row, so that pairs of them are again contiguous documents.
            documents = ids if documents is None else documents * (keys + far) + (ids - ids.amin())
    if documents is not None and (start + queries > keys or documents.shape[1] != keys):
        return None
    if padding is not None:
        padding = padding[:, first_key : first_key + keys]
        if bool(padding.all()):
            padding = None
    left, right = (min(sizes) for sizes in zip(*windows, strict=True))
    causal = right == 0
    window = None if left >= far and right in (0, far) else (left, right)
    return Visible(batch, queries, keys, start, causal, window, documents, padding)


def ids_of(settings: dict[str, Any], first_key: int, keys: int) -> Tensor:
    """Ids of packed documents or of chunks, one per key: (batch, keys)."""
    if "packed_sequence_mask" in settings:
        ids: Tensor = settings["packed_sequence_mask"][:, first_key : first_key + keys].long()
        return ids
    before = settings["left_padding"][:, None]
    position = torch.arange(first_key, first_key + keys, device=before.device)
    return torch.div(position - before, settings["chunk_size"], rounding_mode="floor")


def by_function(mask_function: MaskFunction, padding: Tensor | None, first_key: int, **sizes: Any) -> Visible:
    """A mask that is a function of index tensors, evaluated for one block of queries at a time."""

    def function(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return mask_function(b, h, i + first_key, j + first_key)

    if padding is not None:
        padding = padding[:, first_key : first_key + sizes["keys"]]
    return Visible(**sizes, padding=padding, function=function)


def interval_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Any:
    """The mask of transformers' mask interface, as a tensor that takes no memory or one value per key.

    The arguments are those of transformers' `sdpa_mask`.

    Returns:
        None where nothing is masked; a boolean row per sequence for a single query; else a mask that carries its
        description (`visible_of`). Model types in `ADDITIVE` get the mask that they would get in "eager".
    """
    arguments = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "local_size": local_size,
        "allow_is_causal_skip": allow_is_causal_skip,
        "allow_is_bidirectional_skip": bool(allow_is_bidirectional_skip),
        "use_vmap": use_vmap,
        "device": device,
    }
    tracing = torch.compiler.is_compiling()
    if getattr(config, "model_type", None) in ADDITIVE:
        return eager_mask(**arguments, **kwargs)
    if q_length == 1:  # the mask has one row: nothing can be saved, and no description changes while decoding
        return one_row(arguments)
    if tracing:
        visible = traced(arguments, config, allow_is_bidirectional_skip is not None)
        return sdpa_mask(**arguments) if visible is None else traced_mask(visible, device)
    visible = eagerly(arguments)
    if visible is None:
        return sdpa_mask(**{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    if visible.everything and allow_is_bidirectional_skip:
        return None
    return VisibleMask(visible, torch.device(device))


def one_row(arguments: dict[str, Any]) -> Tensor | None:
    """The mask of a single query: boolean (batch, 1, 1, keys), or None if it sees all keys."""
    padding, window = arguments["attention_mask"], arguments["local_size"]
    if padding is not None and arguments["kv_length"] == 1 and padding.shape[1] > arguments["kv_offset"] + 1:
        # Recurrent Gemma's cache tells no length, since its first layers keep no keys: transformers makes a mask of one
        # key, the first token, for all. The keys are the last ones.
        keys = min(padding.shape[1], window or padding.shape[1])
        seen: Tensor = padding[:, None, None, padding.shape[1] - keys :].bool()
        return seen
    mask: Tensor | None = sdpa_mask(**arguments)
    return mask


def described_mask(attention_mask: Any = None, **arguments: Any) -> Visible:
    """The same for models outside the interface whose attention we replaced: always the description itself.

    It is no tensor, so that such a model cannot add anything to it: Falcon would add ALiBi.
    """
    if isinstance(attention_mask, Visible):  # generate makes the mask before the model does
        return attention_mask
    both_directions = "allow_is_bidirectional_skip" in arguments
    arguments = {**DEFAULTS, **arguments, "attention_mask": attention_mask}
    visible = traced(arguments, None, both_directions) if torch.compiler.is_compiling() else eagerly(arguments)
    if visible is not None:
        return visible
    sizes = {"batch": arguments["batch_size"], "queries": arguments["q_length"], "keys": arguments["kv_length"]}
    written = {**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return Visible(**sizes, function=sdpa_mask(**written))


def eagerly(arguments: dict[str, Any]) -> Visible | None:
    """The description of a mask whose values can be read; None if it must be materialised."""
    sizes = {"batch": arguments["batch_size"], "queries": arguments["q_length"], "keys": arguments["kv_length"]}
    first_query, first_key = int(arguments["q_offset"]), int(arguments["kv_offset"])
    padding = prepare_padding_mask(arguments["attention_mask"], sizes["keys"], first_key)
    parts = recognise(arguments["mask_function"])
    visible = None if parts is None else describe(parts, padding, **sizes, first_query=first_query, first_key=first_key)
    if visible is not None:
        return visible
    if not arguments["use_vmap"] and first_query >= first_key:
        return by_function(arguments["mask_function"], padding, first_key, **sizes, start=first_query - first_key)
    warnings.warn(
        "this model masks attention by a function that relpos does not know as intervals: the mask is materialised, "
        "which takes memory of queries × keys. The result is exact.",
        stacklevel=3,
    )
    return None


def traced(arguments: dict[str, Any], config: Any, both_directions: bool) -> Visible | None:
    """The description of a mask in a traced graph, where neither values nor closures can be read.

    A causal mask that is a conjunction hides a token's predecessor only where a document or a chunk begins, so the
    ids of the documents are counted from there.
    """
    function, offset = arguments["mask_function"], arguments["q_offset"]
    window = arguments["local_size"]
    chunked = window is not None and getattr(config, "attention_chunk_size", None) is not None
    if (
        arguments["use_vmap"]
        or isinstance(offset, Tensor)
        or arguments["kv_offset"] > offset
        or getattr(function, "__name__", "") == "or_mask"
        or (window is not None and window < 2)
        or (chunked and getattr(config, "sliding_window", None) is not None)
    ):
        return None
    batch, queries, keys = arguments["batch_size"], arguments["q_length"], arguments["kv_length"]
    start = offset - arguments["kv_offset"]
    padding = prepare_padding_mask(arguments["attention_mask"], keys, arguments["kv_offset"])
    if padding is not None:
        padding = padding[:, arguments["kv_offset"] : arguments["kv_offset"] + keys]
    documents = None
    if not both_directions and function is not causal_mask_function:
        if start + queries > keys:
            return None
        token = torch.arange(1, keys, device=arguments["device"])[None] + arguments["kv_offset"]
        row = torch.arange(batch, device=arguments["device"])[:, None]
        sees_the_last = function(row, torch.zeros_like(row), token, token - 1)  # (batch or 1, keys − 1)
        starts = (~sees_the_last).long().expand(batch, -1)
        documents = torch.nn.functional.pad(starts.cumsum(1), (1, 0))
    pair = None
    if window is not None and not chunked:
        pair = (window, window) if both_directions else (window - 1, 0)
    return Visible(batch, queries, keys, start, not both_directions, pair, documents, padding)
