"""A tensor as a subject: values that someone already has."""

from collections.abc import Mapping
from typing import Any

from relpos.explorer.scenes import Scene
from relpos.explorer.subjects import Subject, check_entries
from relpos.maps.layer import Layer
from relpos.maps.tensors import TensorLayers
from relpos.maps.values import HeadValues


class TensorScene(Scene):
    """The only scene of a tensor.

    Args:
        request: The completed description.
        tensor: The values.
        caption: What it is, in words.
    """

    def __init__(self, request: Mapping[str, Any], tensor: TensorLayers, caption: str) -> None:
        super().__init__()
        self.request, self.tensor, self.caption = dict(request), tensor, caption
        self.length, self.depth, self.heads = tensor.length, len(tensor.layers), len(tensor.layers[0])
        self.causal, self.tokens, self.notes, self.static = tensor.causal, tensor.tokens, [], True
        self.shows, self.default_show = (tensor.show,), tensor.show

    def layer(self, show: str, number: int) -> Layer:
        raise ValueError("a tensor has values, and no queries and keys.")

    def values(self, show: str, number: int, head: int) -> HeadValues:
        return self.tensor.layers[number - 1][head - 1]

    @property
    def layer_bytes(self) -> int:
        return sum(4 * head.length**2 for heads in self.tensor.layers for head in heads)


class TensorSubject(Subject):
    """A tensor.

    Args:
        identity: Its place among the subjects.
        tensor: The values.
    """

    def __init__(self, identity: str, tensor: TensorLayers) -> None:
        super().__init__(identity, f"{tensor.show} {identity}" if identity != "0" else tensor.show)
        self.tensor = tensor
        self.depth, self.heads = len(tensor.layers), len(tensor.layers[0])
        self.caption = f"A tensor of {self.depth} layers, {self.heads} heads and {tensor.length:,} tokens."

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "kind": "tensor",
            "encoding": None,
            "family": "tensor",
            "layers": self.depth,
            "heads": self.heads,
            "head_dim": 0,
            "key_heads": self.heads,
            "causal": self.tensor.causal,
            "trained_length": None,
            "shows": [self.tensor.show],
            "default_show": self.tensor.show,
            "reads_text": False,
            "can_write": False,
            "documents": [],
            "default": self.complete({}),
            "evaluation": False,
            "formula": None,
            "paper": None,
            "caption": self.caption,
            "parameters": [],
        }

    def complete(self, request: Mapping[str, Any]) -> dict[str, Any]:
        check_entries(request, ("subject", "encoding", "length", "input", "seed", "parameters", "heads", "causal"))
        if request.get("length") not in (None, self.tensor.length):
            raise ValueError(f"this tensor has {self.tensor.length:,} tokens: leave the length out.")
        return {
            "subject": self.id,
            "encoding": None,
            "length": self.tensor.length,
            "input": {"kind": "none"},
            "seed": 0,
            "parameters": {},
            "heads": self.heads,
            "causal": self.tensor.causal,
        }

    def scene(self, request: Mapping[str, Any]) -> Scene:
        return TensorScene(request, self.tensor, self.caption)
