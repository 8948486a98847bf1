"""One layer of attention on one input, laid open: any rows of its maps, written out when asked for."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from relpos.attend import reference
from relpos.attend.operation import positioned
from relpos.encodings.call import Call, products
from relpos.encodings.encoding import Encoding
from relpos.encodings.forms import Form, Scaled, Toeplitz, terms
from relpos.encodings.inputs import make_call

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAPS = ("bias", "scores", "weights")


@dataclass(frozen=True)
class Layer:
    """A layer's queries and keys, and the bias its encoding makes of the input. Causal, one sequence."""

    number: int  # 1 is the first
    heads: int
    call: Call
    form: Form | None
    q: Tensor  # (1, heads, length, head_dim), rotated where the encoding rotates
    k: Tensor
    reads_scores: bool  # whether the bias is computed from the scores

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.call.keys

    @torch.no_grad()
    def rows(self, show: str, first: int, last: int) -> Tensor:
        """The rows first…last of a map: (heads, rows, last + 1), NaN where a key is not seen.

        bias     what is added to the scores
        scores   before the softmax: scaled q·k, rotated, with the bias
        weights  after it
        """
        keys = last + 1  # no row sees further
        call = replace(self.call, queries=keys, keys=keys)
        i = torch.arange(first, keys, device=call.device)
        q, k = self.q[:, :, first:keys], self.k[:, :, :keys]
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
        """Whether the bias is a function of the distance alone, by its form."""
        parts = terms(self.form)
        return bool(parts) and all(isinstance(part, Toeplitz) for part in parts)

    def numbers_a_key(self) -> int:
        """Numbers that are written out for a row and key: one a head, or one a unit of a network."""
        return max([self.heads, *(len(part.slope) for part in terms(self.form) if isinstance(part, Scaled))])


def open_layer(
    number: int, q: Tensor, k: Tensor, position: Encoding | None, hidden: Tensor | None, scale: float | None = None
) -> Layer:
    """A layer from its queries and keys, unrotated (1, heads, length, head_dim), and its input (1, length, width)."""
    call = make_call(q, k, position, hidden, None, True, None, None, scale)
    q, k, form = positioned(q, k, position, call)
    return Layer(number, q.shape[1], call, form, q, k, position is not None and position.needs_scores)


@torch.no_grad()
def model_layers(model: "PreTrainedModel", ids: Tensor, numbers: Iterable[int]) -> list[Layer]:
    """The layers of a model that reads some tokens.

    Args:
        model: Of one of our families.
        ids: Token ids (length,).
        numbers: Of the layers, 1 is the first.

    Raises:
        ValueError: What a layer reads is not finite.
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
            raise ValueError(f"what layer {number} reads is not finite: the model's weights are broken.")
        q, k, _ = layer.attention.project(x)
        layers.append(open_layer(number, q, k, layer.position, x, layer.attention.scale))
    return layers


@torch.no_grad()
def input_free_layers(model: "PreTrainedModel", length: int, numbers: Iterable[int]) -> list[Layer]:
    """The layers of a model for any input of so many tokens: only their bias may be looked at.

    The bias must be the same for every input. Nothing is read, which for a long input takes far longer than the bias.

    Args:
        model: Of one of our families.
        length: Number of tokens.
        numbers: Of the layers, 1 is the first.
    """
    from relpos.models.family import family_of

    all_layers = family_of(model).layers(model)
    layers = []
    for number in numbers:
        layer = all_layers[number - 1]
        q = torch.zeros(1, dtype=model.dtype, device=model.device)
        q = q.expand(1, layer.attention.heads, length, layer.attention.head_dim)
        layers.append(open_layer(number, q, q, layer.position, None, layer.attention.scale))
    return layers


@torch.no_grad()
def encoding_layer(position: Encoding, length: int) -> Layer:
    """An encoding alone, as a layer.

    One that reads its input or the scores gets random ones, N(0, 1). For the others all tokens are equal: what differs
    between them is their position.
    """
    heads, head_dim = position.heads, position.head_dim
    hidden = torch.randn(1, length, position.width) if position.needs_hidden else None
    if position.needs_scores:
        q, k = torch.randn(2, 1, heads, length, head_dim)
        return open_layer(1, q, k, position, hidden)
    token = torch.zeros(1) if "embedding" in position.places else torch.randn(position.width)
    x = position.embed(token.expand(1, length, position.width))
    q = x[..., : heads * head_dim].reshape(1, length, heads, head_dim).transpose(1, 2)  # (1, heads, length, head_dim)
    return open_layer(1, q, q, position, hidden)
