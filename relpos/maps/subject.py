"""What is drawn or explored, an encoding, a model or a tensor: a subject makes views, its layers on an input."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from relpos.attend.arguments import LayerCall
from relpos.encodings.registry import encoding
from relpos.forms.bias import Toeplitz
from relpos.forms.encoding import Encoding
from relpos.maps import HEAD_DIM, HEADS, LENGTH, NO_ATTENTIONS, check_encoding_request
from relpos.maps.head_values import all_heads, flat_values, head_values
from relpos.maps.layer import Layer, Quantity, encoding_layer, open_layer
from relpos.maps.map import PIXELS
from relpos.maps.values import HeadValues, TensorValues
from relpos.system.errors import unknown
from relpos.system.memory import check_memory

Kind = Literal["encoding", "model", "tensor"]
Show = Literal["bias", "scores", "weights", "position", "flat"]  # kinds of values of a head
SHAPES = "(tokens, tokens), (heads, tokens, tokens) or (layers, heads, tokens, tokens)"


@dataclass(frozen=True)
class Request:
    """What a view is asked for; None: the subject's own, or the default."""

    length: int | None = None
    layer: int | str = "last"  # a number from 1 on, last, or all
    seed: int = 0
    causal: bool | None = None
    heads: int | None = None  # these three: of an encoding by name
    head_dim: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    text: tuple[str, str] | None = None  # a text for a model to read, and its name; None: held-out text
    windows: int = 1  # of held-out text, for means
    input_free: bool = False  # whether values that do not depend on the input are enough
    closed: bool = False  # whether scores of a rotation over equal tokens become a table over distances


class View:
    """A subject on an input: its layers, and the words that describe them."""

    static: bool = True  # whether the bias is the same for every input
    turned: bool = False  # whether the scores of equal tokens stand in the place of the bias
    untrained: str = ""  # description of its parameters if they are untrained
    tables: list[Tensor] | None = None  # one per layer: the bias over 2-D offsets, (heads, rows, columns)
    tokens: list[str] | None = None  # the text of each token
    mean_ending: str = ""  # the ending for a mean over all windows; the same if empty
    more: Sequence[Callable[[], list[Layer]]] = ()  # the layers on further windows of text, for means
    layers: list[Layer]
    others: list[Layer] | None = None  # on another input, for the context dependence
    about: dict[str, Any]  # its part of a picture's JSON

    def __init__(
        self,
        kind: Kind,
        label: str,  # in a legend
        titles: tuple[str, str],  # the encoding, or those of the layers, and where it acts
        numbers: list[int],  # of the layers; 1 is the first
        heading: str,  # the beginning of a caption
        ending: str,  # and what follows the name of the values shown
        **attributes: Any,  # any of those above
    ) -> None:
        self.kind, self.label, self.numbers, self.heading, self.ending = kind, label, numbers, heading, ending
        self.encoding, self.place = titles
        vars(self).update(attributes)

    @property
    def length(self) -> int:
        return self.layers[0].length

    @property
    def heads(self) -> int:
        return self.layers[0].heads

    @property
    def causal(self) -> bool:
        return self.layers[0].causal

    def windows(self) -> Iterator[list[Layer]]:
        """The layers on each window of text, one window at a time."""
        yield self.layers
        for compute in self.more:
            yield compute()

    def equal(self) -> list[Layer]:
        """The layers of a model for tokens that differ in position only."""
        raise ValueError(f"{self.label} is not a model.")

    def layer(self, show: Show, number: int) -> Layer:
        """A layer (1 is the first) of which `show` can be read."""
        return self.layers[self.numbers.index(number)]

    def values(self, show: Show, number: int, head: int) -> HeadValues:
        """The values of a head of a layer; 1 is the first of both."""
        layer = self.layer(show, number)
        show = "bias" if self.turned and show == "scores" else show
        if head > layer.heads:
            raise ValueError(f"there is no head {head} in layer {number}: give a number from 1 to {layer.heads}.")
        if show == "flat" and layer.form is not None:
            return flat_values(layer, head - 1)
        quantity: Quantity = "weights" if show == "flat" else show  # type: ignore[assignment]
        return head_values(layer, head - 1, quantity)

    def all_values(self, show: Quantity, number: int) -> list[HeadValues]:
        """The values of all heads of a layer."""
        return all_heads(self.layer(show, number), show)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        storages = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
            for layer in self._kept()
            for x in (layer.q, layer.k, *(() if layer.form is None else (y for _, y in layer.form.tensors())))
        }
        return sum(storages.values())

    def _kept(self) -> list[Layer]:
        return self.layers


def label_apart(views: list[View]) -> list[View]:
    """Number the labels that several views share, as runs of the same name in different folders do."""
    labels = [view.label for view in views]
    for place, view in enumerate(views):
        if labels.count(labels[place]) > 1:
            view.label += f" ({labels[: place + 1].count(labels[place])})"
    return views


class Subject(ABC):
    """An encoding, a model or a tensor that was named."""

    kind: Kind
    name: str
    encoding: str | None
    depth: int = 1  # layers
    heads: int  # per layer
    causal: bool = True
    shows: tuple[Show, ...]  # kinds of values that it has
    default_show: Show

    @abstractmethod
    def view(self, request: Request) -> View:
        """Its layers on an input."""


def refuse_sizes(name: str, heads: int, request: Request) -> None:
    """Refuse heads, head_dim and options for anything but an encoding by name."""
    if request.heads is not None or request.head_dim is not None:
        option = f"--heads {request.heads}" if request.heads is not None else f"--head-dim {request.head_dim}"
        raise ValueError(
            f"{option} is for an untrained encoding; {name} has its own {heads} heads: leave it out, and choose some "
            "of them with --head."
        )
    if request.options:
        names = ", ".join(request.options)
        raise ValueError(f"options {names} are for an encoding by name; a trained model has its own: leave them out.")


class EncodingSubject(Subject):
    """An encoding without a model: by name, with its start values, or an instance as it is."""

    kind = "encoding"

    def __init__(self, what: str | Encoding, name: str | None = None) -> None:
        self.position = what if isinstance(what, Encoding) else None
        self.name = self.encoding = name or (what if isinstance(what, str) else type(what).__name__)
        self.heads = HEADS if self.position is None else self.position.heads

    @cached_property
    def shows(self) -> tuple[Show, ...]:  # type: ignore[override]
        position = self.position or encoding(self.name, self.heads, HEAD_DIM)
        bias: tuple[Show, ...] = ("bias",) if "score" in position.places else ()
        scores: tuple[Show, ...] = ("scores",) if position.needs_scores or position.places != ("score",) else ()
        return (*bias, *scores, "weights" if position.needs_scores else "flat")

    @property
    def default_show(self) -> Show:  # type: ignore[override]
        return self.shows[0]

    def view(self, request: Request) -> View:
        check_encoding_request(request.layer, request.text)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(request.seed)
            return self._view(request, request.length or LENGTH, request.causal is not False)

    def _view(self, request: Request, length: int, causal: bool) -> View:
        position, untrained = self.position, ""
        if position is not None:
            refuse_sizes(self.name, self.heads, request)
        else:
            sizes = (request.heads or self.heads, request.head_dim or HEAD_DIM)
            position = encoding(self.name, *sizes, **request.options)
            untrained = self._start_values(position, request)
        by_distance, cells = 4 * 8 * position.heads * length, 3 * 8 * position.heads * min(length, PIXELS) ** 2
        words = f"a picture of {position.heads:,} heads and {length:,} tokens"
        check_memory(words, by_distance + cells, "give fewer of them")
        if not causal and not position.bidirectional:
            advice = position.advice_for_both_directions
            raise ValueError(f"{self.name} is defined for causal attention only: leave causal=False out. {advice}")
        others: list[Layer] | None
        if request.input_free and position.static_bias and position.place == "score":  # queries and keys do not matter
            zero = torch.zeros(1).expand(1, position.heads, length, position.head_dim)
            layers = others = [open_layer(1, LayerCall(zero, zero, position, {"causal": causal}))]
        else:
            layers = [encoding_layer(position, length, causal)]
            others = None if request.closed else [encoding_layer(position, length, causal)]
        turned = request.closed and turns_by_distance(position)
        options = "".join(f", {key}={value}" for key, value in request.options.items())
        reads = position.needs_hidden or position.needs_scores
        ending = f"({position.heads} heads, head_dim {position.head_dim}{options})"
        ending = f"for a random input {ending}" if reads else ending
        layers = [_as_bias(layer) for layer in layers] if turned else layers
        about = {"heads": position.heads, "head_dim": position.head_dim, "options": dict(request.options)}
        return View(
            "encoding",
            self.name,
            (self.name, position.place),
            [1],
            self.name,
            ending,
            layers=layers,
            others=others,
            about={"model": None, **about, "input": None},
            untrained=untrained,
            static=not reads,
            turned=turned,
        )

    def _start_values(self, position: Encoding, request: Request) -> str:
        """Describe the parameters of a new encoding; empty if it has none."""
        with torch.random.fork_rng(devices=[]):
            second = encoding(self.name, position.heads, position.head_dim, **request.options)
        pairs = list(zip(position.parameters(), second.parameters(), strict=True))
        random = any(not torch.equal(first, again) for first, again in pairs)
        return ("untrained: random start values" if random else "untrained: start values") if pairs else ""


def turns_by_distance(position: Encoding) -> bool:
    """Whether all it does is to rotate queries and keys by their positions: equal tokens then differ by distance."""
    cls = type(position)
    alone = cls.rotate is Encoding.rotate and cls.query_factor is Encoding.query_factor
    return alone and position.place == "query and key" and position.rotates_by_position


def _as_bias(layer: Layer) -> Layer:
    """The scores of equal tokens as a bias by distance on content of 0."""
    table = layer.values_by_distance("scores").float()  # (heads, distances)
    form = Toeplitz(table, table.shape[1] - layer.length)
    return replace(layer, form=form, call=replace(layer.call, rotation=None)).without_content()


class TensorSubject(Subject):
    """A bias, scores or attention weights that exist already.

    `what` is (tokens, tokens), (heads, tokens, tokens) or (layers, heads, tokens, tokens), rows are queries; or one
    tensor per layer, as the `attentions` of transformers, where each may have a batch of one. NaN and −inf are not
    seen, nor is a weight of 0 after a query if all are 0 there. Without `show`, rows that sum to 1 are weights, and
    anything else is scores.
    """

    kind, encoding = "tensor", None

    def __init__(self, what: Any, show: str | None, tokens: Sequence[str] | None) -> None:
        if show is not None and show not in get_args(Quantity):
            raise unknown("kind of values of a tensor", show, get_args(Quantity))
        values = _stacked(what)
        while values.dim() in (2, 3):
            values = values[None]
        if values.dim() != 4 or 0 in values.shape or values.shape[-1] != values.shape[-2]:
            raise ValueError(f"a tensor of the shape {tuple(values.shape)} cannot be drawn: give {SHAPES}.")
        self.depth, self.heads, self.length, _ = values.shape
        if tokens is not None and len(tokens) != self.length:
            raise ValueError(f"there are {len(tokens)} names for {self.length} tokens: give one name per token.")
        empty = (~values.isfinite().flatten(2).any(dim=2)).nonzero()
        if len(empty):
            layer, head = (empty[0] + 1).tolist()
            raise ValueError(f"head {head} of layer {layer} has no finite value: there is nothing to show.")
        show = ("weights" if _sums_to_one(values) else "scores") if show is None else show
        if show == "weights" and not values.triu(1).nan_to_num().any():  # zeros of a causal mask
            values = values.masked_fill(torch.ones(self.length, self.length).triu(1).bool(), torch.nan)
        self.head_values: list[list[HeadValues]] = [[TensorValues(head) for head in heads] for heads in values]
        self.nbytes, self.name = values.nbytes, show
        self.causal = all(head.causal for heads in self.head_values for head in heads)
        self.default_show: Quantity = show  # type: ignore[assignment]
        self.shows = (self.default_show,)
        self.tokens = None if tokens is None else [str(token) for token in tokens]

    def view(self, request: Request) -> "TensorView":
        return TensorView(self, layer_numbers(request.layer, self.depth))


class TensorView(View):
    """Some layers of a tensor."""

    def __init__(self, subject: TensorSubject, numbers: list[int]) -> None:
        heading, ending = f"Tensor, {which_layers(numbers, subject.depth)}", f"of {subject.length:,} tokens"
        about = {"model": None, "heads": subject.heads, "tokens": subject.tokens, "input": None}
        super().__init__("tensor", "tensor", ("tensor", "score"), numbers, heading, ending, layers=[], about=about)
        self.subject, self.tokens = subject, subject.tokens

    @property
    def length(self) -> int:
        return self.subject.length

    @property
    def heads(self) -> int:
        return self.subject.heads

    @property
    def causal(self) -> bool:
        return self.subject.causal

    def values(self, show: Show, number: int, head: int) -> HeadValues:
        return self.subject.head_values[number - 1][head - 1]

    def all_values(self, show: Quantity, number: int) -> list[HeadValues]:
        return self.subject.head_values[number - 1]

    @property
    def nbytes(self) -> int:
        return self.subject.nbytes


def is_tensor(what: object) -> bool:
    """Whether something is a tensor or an array, or a list of them, one per layer."""
    if isinstance(what, list | tuple):
        return bool(what) and all(layer is None or isinstance(layer, Tensor | np.ndarray) for layer in what)
    return isinstance(what, Tensor | np.ndarray)


def _stacked(what: Any) -> Tensor:
    """One tensor on the CPU, in float32 at least; layers with a batch of one are stacked."""
    if isinstance(what, list | tuple):
        if any(layer is None for layer in what):
            raise ValueError(f"some layers are None. {NO_ATTENTIONS}")
        layers = [_stacked(layer) for layer in what]
        layers = [layer[0] if layer.dim() == 4 and len(layer) == 1 else layer for layer in layers]
        if len({layer.shape for layer in layers}) > 1 or layers[0].dim() != 3:
            shapes = sorted({tuple(layer.shape) for layer in layers})
            raise ValueError(
                f"layers of the shapes {shapes} cannot be drawn together: give the same (heads, tokens, tokens) each."
            )
        return torch.stack(layers)
    if isinstance(what, np.ndarray) and what.dtype.kind not in "fiub":
        raise TypeError(f"an array of {what.dtype} holds no numbers that can be drawn: give {SHAPES}.")
    values = torch.as_tensor(what).detach().cpu()
    if values.is_complex():
        raise TypeError(f"a tensor of {values.dtype} cannot be drawn: give real numbers.")
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _sums_to_one(values: Tensor) -> bool:
    """Whether all rows are shares of 1, as attention weights are; rows that see nothing may be all 0."""
    seen = torch.where(values.isfinite(), values, 0.0).double()
    total = seen.sum(dim=-1)
    near = (total - 1).abs() < 1e-2  # weights may be in bfloat16
    return bool((seen >= 0).all() and (near | (total == 0)).all() and near.any())


def layer_numbers(layer: str | int, depth: int) -> list[int]:
    """The layers that are asked for: last, all, or a number; 1 is the first."""
    if layer == "all":
        return list(range(1, depth + 1))
    if layer == "last":
        return [depth]
    if not str(layer).isdigit() or not 1 <= int(layer) <= depth:
        raise ValueError(f"there is no layer {layer}: give last, all, or a number from 1 to {depth}.")
    return [int(layer)]


def which_layers(numbers: Sequence[int], depth: int) -> str:
    """Some layers in words."""
    return "all layers" if len(numbers) > 1 else f"layer {numbers[0]} of {depth}"


def three_heads(heads: int) -> list[int]:
    """The first, the middle and the last head (0 is the first); fewer if there are not as many.

    Example:
        >>> three_heads(12), three_heads(2)
        ([0, 5, 11], [0, 1])
    """
    return sorted({0, max(0, heads // 2 - 1), heads - 1})


def token_name(token: str) -> str:
    """The label of a token on an axis: spaces and newlines made visible, long tokens cut."""
    shown = token.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥").replace("\r", "⏎")
    return shown if len(shown) <= 12 else shown[:11] + "…"
