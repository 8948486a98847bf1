"""The cheapest source of the values of a head of a layer."""

from dataclasses import replace

import torch

from relpos.view.explorer.by_distance import ByDistance
from relpos.view.explorer.entries import CompleteRows, Entries, reads_rows
from relpos.view.explorer.flat_rows import FlatRows
from relpos.view.explorer.sources import Source
from relpos.view.layers import Layer, Values
from relpos.view.maps import bias_by_distance


def layer_source(layer: Layer, head: int, show: Values) -> Source:
    """The bias, scores or weights of a head (0 is the first) of a layer."""
    if reads_rows(layer):
        return CompleteRows(layer, head, show)
    if show == "bias" and even_by_distance(layer):
        return ByDistance(_one_head(layer, head), layer.length)
    return Entries(layer, head, show)


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
    hidden = call.documents is not None or call.padding is not None or call.mask is not None
    return layer.by_distance and call.even and not hidden


def _one_head(layer: Layer, head: int) -> torch.Tensor:
    from relpos.view.explorer.entries import form_of_head

    alone = replace(layer, heads=1, form=form_of_head(layer.form, head), q=layer.q[:, :1], k=layer.k[:, :1])
    return bias_by_distance(alone)[0]
