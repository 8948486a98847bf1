"""All heads at once: a small map, a profile of the attention mass, the class and the measures of every head."""

import base64
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relpos.explorer import limits
from relpos.explorer.measures import LayerMass, colours, entropy, mass_of_layer
from relpos.explorer.model_scenes import ModelScene
from relpos.explorer.scenes import Scene
from relpos.explorer.tensor_subjects import TensorScene
from relpos.maps.bins import bin_means, distance_edges
from relpos.maps.diagonals import Share
from relpos.maps.layer import Layer, Quantity
from relpos.maps.map import compute_map, map_of_layer
from relpos.maps.pyramid import HeadMap

SIDE = 48  # cells per side of a small map
POINTS = 64  # most bins of a profile


def layer_overview(scene: Scene, show: str, number: int, other: Layer | None = None) -> dict[str, Any]:
    """One line of the overview.

    Args:
        scene: The scene.
        show: The kind of values.
        number: The layer; 1 is the first.
        other: The same layer on another input, for the context dependence.

    Raises:
        ValueError: The layer has no such values.
    """
    if isinstance(scene, TensorScene):
        drawn = compute_map(scene.tensor.layers[number - 1], scene.tensor.show, pixels=SIDE)
        uniformity: list[float | None] = drawn.uniformity.heads
        context: list[float | None] = [None] * scene.heads
    else:
        uniformity, context = _measures(scene, show, scene.layer(show, number), other)
    mass = mass_of_layer(scene, show, number)
    heads = []
    for head in range(len(uniformity)):
        head_map = scene.head_map(show, number, head + 1)
        shown = colours(show, *head_map.range)
        heads.append(
            {
                "head": head + 1,
                **_class(mass, head),
                "entropy": entropy(scene, show, number, head),
                "uniformity": uniformity[head],
                "context_dependence": context[head],
                **shown,
                "map": small_map(head_map, shown),
                "profile": mass_bins(mass, head, POINTS),
            }
        )
    return {"layer": number, "heads": heads}


def other_layers(scene: Scene, show: str) -> list[Layer] | None:
    """The layers on a second input, if the context dependence needs them and there is such an input."""
    if not isinstance(scene, ModelScene) or not scene.reads_input or scene.length > limits.MAP_LENGTH:
        return None
    depends = show in ("scores", "weights") or (show == "bias" and not scene.static)
    return scene.other_layers() if depends else None


def _measures(
    scene: Scene, show: str, layer: Layer, other: Layer | None
) -> tuple[list[float | None], list[float | None]]:
    """Uniformity and context dependence of each head; None where they are not measured."""
    nothing: list[float | None] = [None] * layer.heads
    by_distance = show == "bias" and layer.even_by_distance
    if by_distance or (scene.static and scene.measures()["uniformity"] is not None and show == scene.default_show):
        ones: list[float | None] = [1.0] * layer.heads
        return ones, [0.0] * layer.heads
    if show not in ("bias", "scores", "weights") or layer.length > limits.MAP_LENGTH:
        return nothing, [0.0] * layer.heads if show == "bias" and scene.static else nothing
    values: Quantity = show  # type: ignore[assignment]
    measured = map_of_layer(layer, values, other, SIDE)
    context: Share | None = measured.context
    if context is not None:
        return measured.uniformity.heads, context.heads
    return measured.uniformity.heads, [0.0] * layer.heads if scene.static and show == "bias" else nothing


def _class(mass: LayerMass | None, head: int) -> dict[str, Any]:
    if mass is None:
        return {"class": None, "half_distance": None, "decay": None, "sink": None}
    classed = mass.classes[head]
    rate = classed.parameters.get("b") if classed.curve in ("exponential", "power") else None
    return {
        "class": classed.kind,
        "half_distance": classed.half_distance,
        "decay": rate,
        "curve": classed.curve,
        "sink": classed.sink,
    }


def mass_bins(mass: LayerMass | None, head: int, points: int) -> dict[str, Any]:
    """The attention mass per distance in logarithmic bins, without the sink."""
    if mass is None:
        return {"distance": [], "mass": []}
    profile = mass.profile
    edges = distance_edges(profile.length, True, profile.causal)
    while len(edges) - 1 > points:
        edges = np.append(edges[:-1:2], edges[-1])
    means = bin_means(profile.by_distance[head].numpy(), edges, int(profile.distances[0]))
    return {"distance": edges[:-1], "mass": means}


def small_map(head_map: HeadMap, shown: dict[str, Any]) -> str:
    """The means of a map on 48 × 48 cells, as bytes in base64: 0 for no value, 1…255 over the range of the colours."""
    level = head_map.level_of(2 * SIDE)
    sums = head_map.grid(level)
    overlap = _overlap(head_map.cells_at(level))  # (48, cells)
    total, seen = (overlap @ x.double().numpy() @ overlap.T for x in (sums.total, sums.seen))
    empty = seen <= 1e-9
    mean = np.where(empty, np.nan, total / np.where(empty, 1.0, seen))
    return base64.b64encode(quantised(mean, shown).tobytes()).decode("ascii")


def quantised(values: NDArray[Any], shown: dict[str, Any]) -> NDArray[np.uint8]:
    """Values as bytes: 0 for NaN, 1…255 from the lowest to the highest colour, by logarithm where it is logarithmic."""
    low, high = shown["low"], shown["high"]
    if shown["log"]:
        values, low, high = np.log(np.maximum(values, low)), math.log(low), math.log(high)
    share = (values - low) / (high - low) if high > low else np.where(np.isnan(values), np.nan, 0.5)
    places = 1 + np.clip(np.nan_to_num(share), 0, 1) * 254
    return np.where(np.isnan(share), 0, np.rint(places)).astype(np.uint8)


def _overlap(cells: int) -> NDArray[np.float64]:
    """How much of each cell of a row lies in each of 48 equal parts of the row: (48, cells)."""
    edges = np.linspace(0, cells, SIDE + 1)
    first, last = edges[:-1, None], edges[1:, None]
    place = np.arange(cells)
    return np.asarray(np.clip(np.minimum(last, place + 1) - np.maximum(first, place), 0, 1))
