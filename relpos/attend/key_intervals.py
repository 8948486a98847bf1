"""The keys that each query sees, without padding: one interval per query. Computed once for all layers of a model."""

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from relpos.forms.call import Call, document_ends

Result = TypeVar("Result")


def intervals(call: Call) -> tuple[Tensor, Tensor]:
    """The first and the last key that each query sees: (1 or batch, queries), int32.

    Beyond the keys the first may be larger than the last: such a query sees nothing.
    """
    i = call.i.to(torch.int32)[None]  # (1, queries)
    lowest, highest = torch.zeros_like(i), torch.full_like(i, call.keys - 1)
    if call.causal:
        highest = torch.minimum(highest, i)
    if call.window is not None:
        left, right = call.window
        lowest, highest = torch.maximum(lowest, i - left), torch.minimum(highest, i + right)
    if call.documents is not None:
        rows = slice(call.first, call.first + call.queries)
        first, end = (ends[:, rows].to(torch.int32) for ends in document_ends(call.documents))  # (batch, queries)
        lowest, highest = torch.maximum(lowest, first), torch.minimum(highest, end - 1)
    return lowest, highest


class Recent(Generic[Result]):
    """What was computed for the last few geometries. It keeps no tensor alive but its results.

    Tensors are the same if they are the same object, unchanged: `_version` counts changes in place.
    """

    def __init__(self, size: int) -> None:
        self._entries: deque[tuple[Any, tuple[Any, ...], Result]] = deque(maxlen=size)

    def find(self, geometry: Any, tensors: tuple[Tensor | None, ...], build: Callable[[], Result]) -> Result:
        """The result for these arguments; `build` computes it if it is not among the last few."""
        if any(x is not None and x.is_inference() for x in tensors):
            return build()  # a tensor of inference mode does not count its changes
        for same_geometry, marks, result in tuple(self._entries):
            if same_geometry == geometry and all(_is_marked(x, mark) for x, mark in zip(tensors, marks, strict=True)):
                return result
        with torch.inference_mode(False), torch.no_grad():  # a later call may train with the result
            result = build()
        marks = tuple(None if x is None else (weakref.ref(x), x._version) for x in tensors)
        self._entries.append((geometry, marks, result))
        return result

    def __len__(self) -> int:
        return len(self._entries)


def _is_marked(x: Tensor | None, mark: tuple[Any, int] | None) -> bool:
    if x is None or mark is None:
        return x is None and mark is None
    return mark[0]() is x and mark[1] == x._version
