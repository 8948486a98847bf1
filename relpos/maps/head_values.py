"""The values of a head of a layer, in the form that is cheapest to compute."""

from dataclasses import replace

import torch

from relpos.forms.bias import RankOne
from relpos.maps.entries import CompleteRows, Entries
from relpos.maps.layer import Layer, Quantity, form_of_head
from relpos.maps.rank_one import RankOneValues
from relpos.maps.scaled import ScaledValues, has_pieces
from relpos.maps.toeplitz import ByDistance, FlatContent
from relpos.maps.values import Difference, HeadValues


@torch.no_grad()
def head_values(layer: Layer, head: int, show: Quantity) -> HeadValues:
    """The bias, scores or weights of a head (0 is the first) of a layer."""
    if layer.reads_rows:
        return CompleteRows(layer, head, show)
    if show == "bias" and layer.even_by_distance:
        return _by_distance(layer, head)
    if show == "bias" and layer.causal and layer.plain and layer.call.window is None:
        if isinstance(layer.form, RankOne) and not layer.form.symmetric:
            return RankOneValues(layer, head)
        if has_pieces(layer.form):
            return ScaledValues(layer, head)
    return Entries(layer, head, show)


def all_heads(layer: Layer, show: Quantity) -> list[HeadValues]:
    """The values of all heads of a layer."""
    values = [head_values(layer, head, show) for head in range(layer.heads)]
    for other in values[1:]:
        if isinstance(other, CompleteRows) and isinstance(values[0], CompleteRows):
            other.rows = values[0].rows  # computed once for all heads
    return values


@torch.no_grad()
def flat_values(layer: Layer, head: int) -> HeadValues:
    """The softmax of the bias of a head (0 is the first) over equal content."""
    if layer.even_by_distance:
        return FlatContent(_by_distance(layer, head))
    return head_values(layer.without_content(), head, "weights")


def _by_distance(layer: Layer, head: int) -> ByDistance:
    alone = replace(layer, heads=1, form=form_of_head(layer, head), q=layer.q[:, :1], k=layer.k[:, :1])
    values = ByDistance(alone.values_by_distance("bias")[0], layer.length)
    values.causal = layer.causal  # a single token has one distance in either case
    return values


def difference(a: HeadValues, b: HeadValues) -> HeadValues:
    """a − b.

    Raises:
        ValueError: They have different lengths.
    """
    if a.length != b.length:
        raise ValueError(
            f"a difference needs maps of one length, and these have {a.length:,} and {b.length:,} tokens: give both "
            "the same length."
        )
    if isinstance(a, ByDistance) and isinstance(b, ByDistance) and a.zero == b.zero:
        return ByDistance(a.values - b.values, a.length)
    return Difference(a, b)
