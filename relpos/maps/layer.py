"""One attention layer on one input: any rows of its bias, scores or weights, materialised on request."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from relpos.attend import reference
from relpos.attend.arguments import LayerCall, RotaryFrequencies, make_call
from relpos.attend.backends import positioned
from relpos.forms.bias import Form, Scored, Toeplitz, take_heads, terms
from relpos.forms.call import Call, products
from relpos.forms.encoding import Encoding
from relpos.forms.rotation import Rotation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from relpos.models.family import Reader

Quantity = Literal["bias", "scores", "weights"]  # what a map can hold


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
    turned: RotaryFrequencies | None = None  # how q and k were rotated, if by frequencies

    @property
    def length(self) -> int:
        return self.call.keys

    @property
    def causal(self) -> bool:
        """Whether a query sees only keys up to its own position."""
        return self.call.causal

    @torch.no_grad()
    def rows(self, show: Quantity, first: int, last: int) -> Tensor:
        """Materialise the rows of the queries first…last: (heads, rows, keys), NaN where a key is not seen.

        `bias` is what is added to the scores; `scores` are scaled q·k, rotated, with the bias, before the softmax.
        `keys` is last + 1 in a causal layer, since no row sees further, and the length otherwise.
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
            compute = reference.logits if show == "scores" else reference.weights
            values, _ = compute(q, k, self.form, call, i)
            visible = call.visible(i)
        return values.masked_fill(~visible, torch.nan)[0]

    @property
    def by_distance(self) -> bool:
        """Whether the form of the bias makes it a function of the distance alone."""
        parts = terms(self.form)
        return bool(parts) and all(isinstance(part, Toeplitz) for part in parts)

    @property
    def reads_rows(self) -> bool:
        """Whether the bias needs complete rows of all heads."""
        return any(isinstance(part, Scored) for part in terms(self.form))

    @property
    def plain(self) -> bool:
        """Whether positions have no gaps, and only the distance decides what a query sees."""
        call = self.call
        return call.even and call.documents is None and call.padding is None and call.mask is None

    @property
    def even_by_distance(self) -> bool:
        """Whether the bias, with what is not seen, is a function of the distance between the tokens' indices alone."""
        return self.by_distance and self.plain

    def without_content(self) -> "Layer":
        """The layer with queries and keys of 0, so that all content is equal."""
        q, k = (torch.zeros(1, dtype=x.dtype).expand(1, x.shape[1], x.shape[2], 1) for x in (self.q, self.k))
        return replace(self, q=q, k=k)

    def values_by_distance(self, show: Quantity) -> Tensor:
        """Values that are a function of the distance, by distance: (heads, distances) in float64."""
        last = self.length - 1
        backward = self.rows(show, last, last)[:, 0].double().flip(-1)  # (heads, length): the distances 0…length − 1
        if self.causal:
            return backward
        forward = self.rows(show, 0, 0)[:, 0].double().flip(-1)  # (heads, length): −(length − 1)…0
        return torch.cat([forward[:, :-1], backward], dim=-1)

    def form_of_head(self, head: int) -> Form | None:
        """The bias of one head (0 is the first), as a form with a single head."""
        return None if self.form is None else take_heads(self.form, slice(head, head + 1), self.heads)


def open_layer(number: int, seen: LayerCall) -> Layer:
    """Make a layer from its queries and keys; 1 is the first."""
    position = seen.position
    call = make_call(seen.q, seen.k, position, **seen.arguments)
    q, k, form, call = positioned(seen.q, seen.k, position, call)
    q, k = call.rotated(q, k)
    reads_scores = position is not None and position.needs_scores
    return Layer(number, q.shape[1], call, form, q, k, reads_scores, seen.turned or turns(call.rotation))


def turns(rotation: Rotation | None) -> RotaryFrequencies | None:
    """The frequencies of a rotation by tables; None if there is none, or if it stretches vectors as xPos does."""
    if rotation is None or rotation.k_cos.shape[1] < 2:
        return None
    size = torch.hypot(rotation.k_cos, rotation.k_sin)
    if not bool(torch.allclose(size, size[:, :1], rtol=1e-3)):
        return None
    angle = torch.atan2(rotation.k_sin[0, :2].double(), rotation.k_cos[0, :2].double())  # of two neighbours
    return RotaryFrequencies(angle[1] - angle[0], rotation.layout)


@torch.no_grad()
def model_layers(family: "Reader", model: "PreTrainedModel", ids: Tensor, numbers: Sequence[int]) -> list[Layer]:
    """The layers of a model for token ids (length,); 1 is the first layer."""
    calls = family.calls(model, ids, numbers)
    return [open_layer(number, call) for number, call in zip(numbers, calls, strict=True)]


@torch.no_grad()
def layers_without_input(
    family: "Reader", model: "PreTrainedModel", length: int, numbers: Sequence[int]
) -> list[Layer] | None:
    """The layers of a model that is not run, of which only the bias can be read; None if it depends on the input."""
    calls = family.calls_without_input(model, length, numbers)
    if calls is None:
        return None
    return [open_layer(number, call) for number, call in zip(numbers, calls, strict=True)]


@torch.no_grad()
def encoding_layer(position: Encoding, length: int, causal: bool = True) -> Layer:
    """Make a layer of an encoding without a model.

    An encoding that reads the layer's input or the scores gets random ones, N(0, 1). For the other encodings all tokens
    are equal and differ in their position only.
    """
    heads, head_dim = position.heads, position.head_dim
    hidden = torch.randn(1, length, position.width) if position.needs_hidden else None
    if position.needs_scores:
        q, k = torch.randn(2, 1, heads, length, head_dim)
        return open_layer(1, LayerCall(q, k, position, {"hidden": hidden, "causal": causal}))
    token = torch.zeros(1) if "embedding" in position.places else torch.randn(position.width)
    x = position.embed(token.expand(1, length, position.width))
    q = x[..., : heads * head_dim].reshape(1, length, heads, head_dim).transpose(1, 2)  # (1, heads, length, head_dim)
    return open_layer(1, LayerCall(q, q, position, {"hidden": hidden, "causal": causal}))
