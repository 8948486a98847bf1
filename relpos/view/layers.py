"""One attention layer on one input: any rows of its bias, scores or weights, materialised on request."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from relpos.attend import reference
from relpos.attend.operation import positioned
from relpos.encodings.call import Call, products
from relpos.encodings.encoding import Encoding
from relpos.encodings.forms import Form, Scaled, Toeplitz, terms
from relpos.encodings.inputs import make_call
from relpos.encodings.rotation import Rotation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Values = Literal["bias", "scores", "weights"]  # what a map can hold


class Rotary(Protocol):
    """How fast pairs of dimensions of queries and keys are rotated."""

    @property
    def frequencies(self) -> Tensor:
        """Radians per token of each pair: (pairs,). Dimensions from 2·pairs on are not rotated."""

    @property
    def layout(self) -> str:
        """Which dimensions form pair m: m and m + pairs ("half"), or 2m and 2m + 1 ("interleaved")."""


@dataclass(frozen=True)
class Turns:
    """The rotation of one of our encodings."""

    frequencies: Tensor
    layout: str


@dataclass(frozen=True)
class Layer:
    """The queries and keys of one layer for one sequence, and the bias that its encoding adds to their scores."""

    number: int  # 1 is the first layer
    heads: int
    call: Call
    form: Form | None
    q: Tensor  # (1, heads, length, head_dim), rotated where the encoding rotates
    k: Tensor  # (1, key_heads, length, head_dim), likewise; each key head serves heads / key_heads heads
    reads_scores: bool  # whether the bias is computed from the scores
    rotary: Rotary | None = None  # how q and k were rotated, if by frequencies

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.call.keys

    @property
    def causal(self) -> bool:
        """Whether a query sees only keys up to its own position."""
        return self.call.causal

    @torch.no_grad()
    def rows(self, show: Values, first: int, last: int) -> Tensor:
        """Materialise the rows first…last of a map.

        Args:
            show: bias: what is added to the scores. scores: scaled q·k, rotated, with the bias, before the softmax.
                weights: after the softmax.
            first: Position of the first query.
            last: Position of the last query, included.

        Returns:
            (heads, rows, keys), NaN where a query does not see a key. `keys` is last + 1 in a causal layer, since no
            row sees further, and the length otherwise.
        """
        keys = last + 1 if self.causal else self.length
        call = replace(self.call, queries=keys, keys=keys)
        i = torch.arange(first, last + 1, device=call.device)
        q, k = self.q[:, :, first : last + 1], self.k[:, :, :keys]
        if show == "bias":
            assert self.form is not None
            visible = call.visible(i)
            scores = products(q.to(call.dtype) * call.scale, k.to(call.dtype)) if self.reads_scores else None
            values = self.form.block(i, call.j, scores, visible)
        else:
            values, visible = reference.logits(q, k, self.form, call, i)
            if show == "weights":
                values = values.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        return values.masked_fill(~visible, torch.nan)[0]

    @property
    def by_distance(self) -> bool:
        """Whether the form of the bias makes it a function of the distance alone."""
        parts = terms(self.form)
        return bool(parts) and all(isinstance(part, Toeplitz) for part in parts)

    def values_per_entry(self) -> int:
        """Values that are materialised per query and key: one per head, or one per unit of a network."""
        return max([self.heads, *(len(part.slope) for part in terms(self.form) if isinstance(part, Scaled))])


def open_layer(
    number: int,
    q: Tensor,
    k: Tensor,
    position: Encoding | None,
    hidden: Tensor | None,
    scale: float | None = None,
    causal: bool = True,
) -> Layer:
    """Make a layer from its queries and keys.

    Args:
        number: Number of the layer; 1 is the first.
        q: Queries before rotation, (1, heads, length, head_dim).
        k: Keys before rotation, (1, heads, length, head_dim).
        position: The layer's encoding.
        hidden: The layer's input (1, length, width), for encodings that read it.
        scale: Factor of q·k; head_dim^−½ by default.
        causal: Whether a query sees only keys up to its own position.

    Returns:
        The layer.

    Raises:
        ValueError: If the encoding does not fit the queries, or is defined for causal attention only.
    """
    call = make_call(q, k, position, hidden=hidden, causal=causal, scale=scale)
    q, k, form, call = positioned(q, k, position, call)
    q, k = call.rotated(q, k)
    reads_scores = position is not None and position.needs_scores
    return Layer(number, q.shape[1], call, form, q, k, reads_scores, rotary=turns(call.rotation))


def turns(rotation: Rotation | None) -> Turns | None:
    """The frequencies of a rotation by tables; None if there is none, or if it stretches vectors as xPos does."""
    if rotation is None or rotation.k_cos.shape[1] < 2:
        return None
    size = torch.hypot(rotation.k_cos, rotation.k_sin)
    if not bool(torch.allclose(size, size[:, :1], rtol=1e-3)):
        return None
    angle = torch.atan2(rotation.k_sin[0, :2].double(), rotation.k_cos[0, :2].double())  # of two neighbours
    return Turns(angle[1] - angle[0], rotation.layout)


@torch.no_grad()
def model_layers(model: "PreTrainedModel", ids: Tensor, numbers: Iterable[int]) -> list[Layer]:
    """The layers of a model for an input.

    Args:
        model: A model of one of the families.
        ids: Token ids (length,).
        numbers: Numbers of the layers; 1 is the first.

    Raises:
        ValueError: The input of a layer is not finite.
    """
    from relpos.models.family import family_of

    family = family_of(model)
    chosen = {number: family.layers(model)[number - 1] for number in numbers}
    inputs: dict[int, Tensor] = {}

    def keep(number: int) -> Callable[[Any, tuple[Tensor, ...]], None]:
        return lambda module, arguments: inputs.update({number: arguments[0]})

    hooks = [layer.attention.register_forward_pre_hook(keep(number)) for number, layer in chosen.items()]
    try:
        family.hidden(model, ids[None].to(model.device))
    finally:
        for hook in hooks:
            hook.remove()
    layers = []
    for number, layer in chosen.items():
        x = inputs[number]
        if not bool(x.isfinite().all()):
            raise ValueError(f"the input of layer {number} is not finite: the model's weights are damaged.")
        q, k, _ = layer.attention.project(x)
        layers.append(open_layer(number, q, k, layer.position, x, layer.attention.scale, layer.attention.causal))
    return layers


@torch.no_grad()
def input_free_layers(model: "PreTrainedModel", length: int, numbers: Iterable[int]) -> list[Layer]:
    """The layers of a model without an input. Only their bias can be drawn, and it must be the same for every input.

    The model is not run, which for a long input would take far longer than computing the bias.

    Args:
        model: A model of one of the families.
        length: Number of tokens.
        numbers: Numbers of the layers; 1 is the first.
    """
    from relpos.models.family import family_of

    all_layers = family_of(model).layers(model)
    layers = []
    for number in numbers:
        layer = all_layers[number - 1]
        q = torch.zeros(1, dtype=model.dtype, device=model.device)
        q = q.expand(1, layer.attention.heads, length, layer.attention.head_dim)
        layers.append(open_layer(number, q, q, layer.position, None, layer.attention.scale, layer.attention.causal))
    return layers


@torch.no_grad()
def encoding_layer(position: Encoding, length: int, causal: bool = True) -> Layer:
    """Make a layer of an encoding without a model.

    An encoding that reads the layer's input or the scores gets random ones, N(0, 1). For the other encodings all tokens
    are equal and differ in their position only.

    Args:
        position: The encoding.
        length: Number of tokens.
        causal: Whether a query sees only keys up to its own position.

    Returns:
        The layer, with number 1.

    Raises:
        ValueError: If the encoding is defined for causal attention only and `causal` is False.
    """
    heads, head_dim = position.heads, position.head_dim
    hidden = torch.randn(1, length, position.width) if position.needs_hidden else None
    if position.needs_scores:
        q, k = torch.randn(2, 1, heads, length, head_dim)
        return open_layer(1, q, k, position, hidden, causal=causal)
    token = torch.zeros(1) if "embedding" in position.places else torch.randn(position.width)
    x = position.embed(token.expand(1, length, position.width))
    q = x[..., : heads * head_dim].reshape(1, length, heads, head_dim).transpose(1, 2)  # (1, heads, length, head_dim)
    return open_layer(1, q, q, position, hidden, causal=causal)
