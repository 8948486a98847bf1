"""The cheapest source of the values of a head of a layer."""

from dataclasses import replace

import torch

from relpos.forms.bias import RankOne, Scaled
from relpos.maps.by_distance import ByDistance
from relpos.maps.entries import CompleteRows, Entries, form_of_head, reads_rows
from relpos.maps.flat_rows import FlatRows
from relpos.maps.layers import Layer, Values
from relpos.maps.map import bias_by_distance
from relpos.maps.rank_one_rows import RankOneRows
from relpos.maps.scaled_maps import has_pieces
from relpos.maps.scaled_rows import ScaledRows, rises
from relpos.maps.sources import Source


@torch.no_grad()
def layer_source(layer: Layer, head: int, show: Values) -> Source:
    """The bias, scores or weights of a head (0 is the first) of a layer."""
    if reads_rows(layer):
        return CompleteRows(layer, head, show)
    if show == "bias" and even_by_distance(layer):
        return ByDistance(_one_head(layer, head), layer.length)
    if show == "bias" and layer.causal and _plain(layer):
        if isinstance(layer.form, RankOne) and not layer.form.symmetric:
            return RankOneRows(layer, head)
        if isinstance(layer.form, Scaled) and layer.form.where is None and has_pieces(layer.form) and rises(layer.form):
            return ScaledRows(layer, head)
    return Entries(layer, head, show)


@torch.no_grad()
def flat_source(layer: Layer, head: int) -> Source:
    """The softmax of the bias of a head (0 is the first) over equal content."""
    if even_by_distance(layer):
        return FlatRows(ByDistance(_one_head(layer, head), layer.length))
    return layer_source(without_content(layer), head, "weights")


def without_content(layer: Layer) -> Layer:
    """The layer with queries and keys of 0, so that all content is equal."""
    q, k = (torch.zeros(1, dtype=x.dtype).expand(1, x.shape[1], x.shape[2], 1) for x in (layer.q, layer.k))
    return replace(layer, q=q, k=k)


def even_by_distance(layer: Layer) -> bool:
    """Whether the bias, with what is not seen, is a function of the distance between the tokens' indices alone."""
    call = layer.call
    return layer.by_distance and call.even and call.documents is None and call.padding is None and call.mask is None


def _plain(layer: Layer) -> bool:
    """Whether a query sees all keys up to its own."""
    call = layer.call
    return call.even and call.window is None and call.documents is None and call.padding is None and call.mask is None


def _one_head(layer: Layer, head: int) -> torch.Tensor:
    alone = replace(layer, heads=1, form=form_of_head(layer, head), q=layer.q[:, :1], k=layer.k[:, :1])
    return bias_by_distance(alone)[0]
