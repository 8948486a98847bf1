"""Scenes of an encoding without a model: the teacher's page, with sliders, in no time."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from relpos.attend.arguments import LayerCall
from relpos.encodings.registry import card
from relpos.explorer import limits
from relpos.explorer.scenes import Scene
from relpos.explorer.sliders import make_encoding
from relpos.forms.bias import Toeplitz
from relpos.forms.encoding import Encoding
from relpos.maps.head_values import flat_values, head_values
from relpos.maps.layer import Layer, encoding_layer, open_layer
from relpos.maps.values import HeadValues


class EncodingScene(Scene):
    """An encoding by name on tokens that differ in their position only; on random ones if it reads its input.

    Args:
        request: The completed description: encoding, length, heads, seed, causal, parameters.

    Raises:
        ValueError: A value is out of range, or the encoding is causal only.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        super().__init__()
        self.request = dict(request)
        name, self.length, seed = request["encoding"], request["length"], request["seed"]
        self.heads, self.depth, self.causal = request["heads"], 1, request["causal"]
        position = make_encoding(name, self.heads, limits.HEAD_DIM, request["parameters"], seed)
        if not self.causal and not position.bidirectional:
            raise ValueError(f"{name} is defined for causal attention only. {position.advice_for_both_directions}")
        self.shows = encoding_shows(position)
        if self.length > limits.ENTRY_LENGTH and "Scaled" in position.form:  # no closed form of its softmax
            self.shows = tuple(show for show in self.shows if show != "flat")
        self.default_show = self.shows[0]
        reads = position.needs_hidden or position.needs_scores
        self.static = not reads
        self.notes = []
        self._check_length(name, position)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            if position.static_bias:  # queries and keys do not matter
                zero = torch.zeros(1).expand(1, self.heads, self.length, position.head_dim)
                self._layer = open_layer(1, LayerCall(zero, zero, position, {"causal": self.causal}))
            else:
                self._layer = encoding_layer(position, self.length, self.causal)
        self._turned = _turns_by_distance(position)
        if self._turned:  # the scores of equal tokens are a table over distances, as a bias is
            self._layer = _as_bias(self._layer)
        ending = ", for a random input" if reads else ", of equal tokens" if self.default_show != "bias" else ""
        size = f"{self.heads} heads, head_dim {position.head_dim}, {self.length:,} tokens"
        self.caption = f"{name}: {card(name).summary} {size}{ending}."

    def _check_length(self, name: str, position: Encoding) -> None:
        most, why = limits.LENGTH, ""
        if position.form.find("Scored") >= 0:
            most, why = limits.ROWS_LENGTH, f": {name} needs complete rows of all heads"
        elif not (position.static_bias or _turns_by_distance(position)):
            most, why = limits.ENTRY_LENGTH, f": {name} is computed from queries and keys, or from an input"
        if self.length > most:
            raise ValueError(f"{self.length:,} tokens are too many{why}: give a length of at most {most:,}.")

    def layer(self, show: str, number: int) -> Layer:
        return self._layer

    def values(self, show: str, number: int, head: int) -> HeadValues:
        if show == "flat" and ("bias" in self.shows or self._turned):
            return flat_values(self._layer, head - 1)
        values = "weights" if show == "flat" else "bias" if self._turned else show
        return head_values(self._layer, head - 1, values)  # type: ignore[arg-type]

    @property
    def layer_bytes(self) -> int:
        layer = self._layer
        tensors = [layer.q, layer.k, *(() if layer.form is None else (x for _, x in layer.form.tensors()))]
        return sum(x.untyped_storage().nbytes() for x in tensors)

    def measures(self) -> dict[str, Any]:
        if not self._layer.even_by_distance or (self.default_show != "bias" and not self._turned):
            return super().measures()
        return {"uniformity": [[1.0] * self.heads], "context_dependence": [[0.0] * self.heads]}


def encoding_shows(position: Encoding) -> tuple[str, ...]:
    """The kinds of values of an encoding without a model; the first is the default."""
    bias = ("bias",) if "score" in position.places else ()
    scores = ("scores",) if position.needs_scores or position.places != ("score",) else ()
    return (*bias, *scores, "weights" if position.needs_scores else "flat")


def _turns_by_distance(position: Encoding) -> bool:
    """Whether all it does is to rotate queries and keys by their positions: equal tokens then differ by distance."""
    cls = type(position)
    alone = cls.rotate is Encoding.rotate and cls.query_factor is Encoding.query_factor
    return alone and position.place == "query and key" and position.rotates_by_position


def _as_bias(layer: Layer) -> Layer:
    """The scores of equal tokens as a bias by distance on content of 0."""
    table = layer.values_by_distance("scores").float()  # (heads, distances)
    form = Toeplitz(table, table.shape[1] - layer.length)
    return replace(layer, form=form, call=replace(layer.call, rotation=None)).without_content()
