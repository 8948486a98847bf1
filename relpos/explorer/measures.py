"""What is measured on a head: its range and colours, its profile by distance, its attention mass and class."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relpos.explorer import limits
from relpos.explorer.model_scenes import ModelScene
from relpos.explorer.scenes import Scene
from relpos.maps.by_distance import ByDistance
from relpos.maps.diagonals import Diagonals
from relpos.maps.entries import Entries, reads_rows
from relpos.maps.flat_rows import FlatRows
from relpos.maps.head_maps import HeadMap
from relpos.maps.heads.head_classes import LEAST_LENGTH, HeadClass, class_heads
from relpos.maps.heads.mass_profiles import MassProfile, layer_mass
from relpos.maps.layer_sources import even_by_distance, flat_source, without_content
from relpos.maps.layers import Layer
from relpos.maps.map import bias_by_distance
from relpos.maps.sources import ENTRIES
from relpos.pictures.colours import LEAST_WEIGHT, both_signs

WEIGHTS = ("weights", "flat")  # kinds of values with a logarithmic colour scale
SAMPLED = 256  # queries of a long map whose profile is drawn
CLASS_LENGTH = 8192  # tokens up to which heads are classed: the fits take longer than linear time
MASS_LENGTH = 4096  # tokens up to which the mass of content that is not a function of the distance is computed


def colours(show: str, low: float, high: float) -> dict[str, Any]:
    """The range of the colours of a map, the name of the colour map, and whether it is logarithmic."""
    if show in WEIGHTS:
        low, high = max(low, LEAST_WEIGHT), max(high, 2 * LEAST_WEIGHT)
        return {"low": low, "high": high, "colour_map": "weights", "log": True}
    name = "diverging" if both_signs(low, high) else "sequential"
    return {"low": low + 0.0, "high": high + 0.0, "colour_map": name, "log": False}


@dataclass(frozen=True)
class LayerMass:
    """The attention mass of a layer, and the classes of its heads."""

    profile: MassProfile
    classes: list[HeadClass]


def attention_layer(scene: Scene, show: str, number: int) -> Layer | None:
    """The layer whose attention is measured: on the input, or of equal content; None if that would take too long."""
    if isinstance(scene, ModelScene) and scene.reads_input and show != "flat":
        return scene.layer("weights", number)
    layer = scene.layer(show, number)
    return layer if "weights" in scene.shows and show != "flat" else without_content(layer) if layer.form else layer


def mass_of_layer(scene: Scene, show: str, number: int) -> LayerMass | None:
    """The mass and the classes of a layer; None if it is too long, or too short to be classed."""
    kind = "flat" if show == "flat" else "content"
    return scene.measured(("mass", kind, number), lambda: _mass_of_layer(scene, show, number))


def _mass_of_layer(scene: Scene, show: str, number: int) -> LayerMass | None:
    layer = attention_layer(scene, show, number)
    if layer is None or not LEAST_LENGTH <= layer.length <= CLASS_LENGTH:
        return None
    content = bool(layer.q.any()) if layer.q.shape[-1] > 1 else False
    if not content and even_by_distance(layer) and layer.causal:
        profile = _flat_profile(layer)
    elif layer.length <= MASS_LENGTH:
        profile = layer_mass(_contiguous(layer))
    else:
        return None
    return LayerMass(profile, class_heads([profile])[0])


def _contiguous(layer: Layer) -> Layer:
    """The layer with q and k in memory of their own: the kernel reads no expanded tensors."""
    return replace(layer, q=layer.q.contiguous(), k=layer.k.contiguous())


def _flat_profile(layer: Layer) -> MassProfile:
    """The mass of equal content under a bias by distance: mass(d) = e^b(d) · Σ_{i ≥ d} 1 / Z_i / length."""
    values = bias_by_distance(layer)  # (heads, length)
    lse = torch.where(values.isfinite(), values, -torch.inf).logcumsumexp(dim=1)  # log Z_i
    after = (-lse).flip(1).logcumsumexp(dim=1).flip(1)  # log Σ_{i ≥ d} 1 / Z_i
    whole = torch.where(values.isfinite(), values + after, -torch.inf).exp() / layer.length
    first = torch.where(values.isfinite(), values - lse, -torch.inf).exp()  # of key 0: at distance i of query i
    by_distance = (whole - first / layer.length).clamp(min=0)
    seen = layer.length if bool(values.isfinite().all()) else int(values.isfinite().any(dim=0).nonzero().max()) + 1
    window = None if seen >= layer.length else (seen - 1, 0)
    return MassProfile(
        layer.number,
        layer.length,
        True,
        window,
        1,
        torch.arange(layer.length),
        by_distance,
        first.sum(dim=1) / layer.length,
    )


def entropy(scene: Scene, show: str, number: int, head: int) -> float | None:
    """The mean entropy of a head's attention in nats, over the queries; None if that would take too long."""
    layer = attention_layer(scene, show, number)
    if layer is None:
        return None
    source = flat_source(layer, head) if layer.q.shape[-1] == 1 and layer.form is not None else None
    if isinstance(source, FlatRows):
        return source.mean_entropy
    if layer.length > MASS_LENGTH or reads_rows(layer):
        return None
    return float(Entries(layer, head, "weights").entropy.mean())


def profile(head_map: HeadMap, causal: bool, points: int = 512) -> dict[str, Any]:
    """Value against distance: mean, minimum and maximum of some diagonals, and over how many queries."""
    source, length = head_map.source, head_map.length
    lowest = 0 if causal else 1 - length
    if isinstance(source, ByDistance):
        values = source.values
        low = mean = high = values
        queries = length
    else:
        low, mean, high, queries = _diagonals(head_map, causal)
    chosen = _spread(lowest, length - 1, points)
    place = torch.tensor(chosen) - lowest
    return {
        "distance": chosen,
        "mean": mean[place].float(),
        "low": low[place].float(),
        "high": high[place].float(),
        "queries": queries,
    }


def _diagonals(head_map: HeadMap, causal: bool) -> tuple[Tensor, Tensor, Tensor, int]:
    source, length = head_map.source, head_map.length
    if length <= limits.MAP_LENGTH:
        diagonals = Diagonals(1, length, causal)
        rows = max(1, ENTRIES // 4 // length)
        for first in range(0, length, rows):
            end = min(first + rows, length)
            values = source.block(first, end, 0, end if causal else length)
            diagonals.add(values.double()[None], first)
        unseen = diagonals.count[0] == 0
        low, mean, high = (x[0].masked_fill(unseen, torch.nan) for x in (diagonals.low, diagonals.mean, diagonals.high))
        return low, mean, high, length
    count = length if causal else 2 * length - 1
    low, high = torch.full((count,), torch.inf), torch.full((count,), -torch.inf)
    total, seen = torch.zeros(2, count, dtype=torch.float64)
    queries = np.unique(np.linspace(0, length - 1, SAMPLED).round().astype(int)).tolist()
    for query in queries:
        right = query + 1 if causal else length
        values = source.block(query, query + 1, 0, right)[0].flip(0)  # by distance, from query − right + 1 on
        here = slice(query - right + 1 + count - length, query + 1 + count - length)
        good = values.isfinite()
        low[here] = torch.minimum(low[here], torch.where(good, values, torch.inf))
        high[here] = torch.maximum(high[here], torch.where(good, values, -torch.inf))
        total[here] += torch.where(good, values, 0.0)
        seen[here] += good
    empty = seen == 0
    return low.masked_fill(empty, torch.nan), total / seen, high.masked_fill(empty, torch.nan), len(queries)


def _spread(lowest: int, highest: int, points: int) -> list[int]:
    """At most `points` distances, all of the near ones and ever fewer of the far ones."""
    if highest - lowest < points:
        return list(range(lowest, highest + 1))
    half = points // 2 if lowest < 0 else points
    far = np.geomspace(1, highest, half * 2)
    near = np.unique(np.concatenate([np.arange(half // 4), far.round().astype(int)]))
    while len(near) > half:  # thin out what is far
        near = np.concatenate([near[: half // 2], near[half // 2 :: 2], near[-1:]])
    near = np.unique(np.append(near, highest))[: points if lowest == 0 else half]
    near[-1] = highest
    return [int(d) for d in (near if lowest == 0 else np.unique(np.concatenate([-near, near])))]
