"""What is measured on heads: the line of each in the overview, and the numbers beside the map of one."""

import base64
import math
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from relpos.explorer import explore_options as options
from relpos.explorer import replies
from relpos.explorer.replies import SIDE
from relpos.explorer.scenes import Scene
from relpos.maps.diagonals import bin_means, distance_edges, spread
from relpos.maps.distance_profiles import MassProfile, flat_mass, layer_mass, mass_of_weights
from relpos.maps.head_classes import LEAST_LENGTH, HeadClass, class_heads
from relpos.maps.head_values import flat_values, head_values
from relpos.maps.layer import Layer, Quantity
from relpos.maps.map import ColourScale, HeadMap, both_signs, compute_map, map_of_layer
from relpos.maps.model_subject import ModelView
from relpos.maps.subject import Show
from relpos.maps.values import HeadValues
from relpos.pictures.captions import SHOWN
from relpos.pictures.colours import linear_ticks

WORDS = {
    **SHOWN,
    "position": "the positional part of the scores",
    "flat": "the weights by position only, the softmax over equal content",
}
OVERVIEW_BINS, DETAIL_BINS, PROFILE_POINTS = 64, 256, 512  # at most
TICKS = 6  # of a colour bar, at most
Ratios = list[float | None]  # of each head


def colour_scale(head_map: HeadMap, show: str, signed: bool) -> ColourScale:
    """The colours of a map; `signed` is decided for the page, by `Scene.both_signs`."""
    if show in ("weights", "flat"):
        return ColourScale.of_weights(*head_map.range, head_map.length)
    return ColourScale.of(*head_map.range, signed, head_map.typical_range(show))


def _scale(scale: ColourScale) -> replies.Scale:
    low, high = scale.ends
    powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1) if scale.log else ()
    ticks = [10.0**power for power in powers] or [high] if scale.log else linear_ticks(low, high, TICKS)
    return {"low": low, "high": high, "log": scale.log, "ticks": ticks, "extend": scale.extend}


def _colours(head_map: HeadMap, scale: ColourScale) -> replies.Colours:
    low, high = head_map.range
    about = {"low": low, "high": high, "log": scale.log, "colour_map": scale.colour_map}
    return {**about, "scale": _scale(scale)}  # type: ignore[typeddict-item]


def scales(head_map: HeadMap, show: str, signed: bool) -> tuple[ColourScale, ColourScale]:
    """The colours of a map, with and without the first key."""
    low, high = head_map.range_without_sink
    if show in ("weights", "flat"):
        without = ColourScale.of_weights(low, high, head_map.length)
    else:
        first, last = head_map.typical_range(show)
        without = ColourScale.of(low, high, signed, (max(first, low), min(last, high)))
    return colour_scale(head_map, show, signed), without


def ranges(head_map: HeadMap, show: str, both: bool, plain: bool = False) -> replies.Range:
    """The range of the values and of the colours, with and without the first key.

    `both` says whether the heads of its page have both signs; `plain` asks for the colours of one sign nevertheless,
    beside maps of another page that have them.
    """
    scale, without = scales(head_map, show, both and not plain)
    low_without, high_without = head_map.range_without_sink
    return {
        **_colours(head_map, scale),
        "both_signs": both or scale.log,  # weights go beside both
        "low_without_sink": low_without,
        "high_without_sink": high_without,
        "scale_without_sink": _scale(without),
    }


def difference_ranges(head_map: HeadMap) -> replies.Range:
    """The same for the difference of two heads."""
    return ranges(head_map, "difference", both_signs([head_map.range]))


@dataclass(frozen=True)
class LayerMass:
    """The attention mass of a layer, and the classes of its heads."""

    profile: MassProfile
    classes: list[HeadClass]


def _attention_layer(scene: Scene, show: Show, number: int) -> Layer:
    """The layer whose attention is measured: on the input, or of equal content."""
    if isinstance(scene.view, ModelView) and scene.view.shown is not None and show != "flat":
        return scene.view.layer("weights", number)
    layer = scene.view.layer(show, number)
    return layer if layer.form is None or ("weights" in scene.shows and show != "flat") else layer.without_content()


def mass_of_layer(scene: Scene, show: Show, number: int) -> LayerMass | None:
    """The mass and the classes of a layer; None if it is too long, or too short to be classed."""
    kind = "flat" if show == "flat" else "content"
    return scene.measured(("mass", kind, number), lambda: _mass_of_layer(scene, show, number))


def _mass_of_layer(scene: Scene, show: Show, number: int) -> LayerMass | None:
    if not LEAST_LENGTH <= scene.length <= options.CLASS_LENGTH:
        return None
    if scene.view.kind == "tensor":
        if show != "weights" or scene.length > options.MASS_LENGTH:
            return None
        profile = mass_of_weights(scene.view.all_values("weights", number), number)
    else:
        layer = _attention_layer(scene, show, number)
        content = layer.q.shape[-1] > 1 and bool(layer.q.any())
        if not content and layer.even_by_distance and layer.causal:
            profile = flat_mass(layer)
        elif layer.length <= options.MASS_LENGTH:
            profile = layer_mass(layer)
        else:
            return None
    return LayerMass(profile, class_heads([profile])[0])


def _entropy(scene: Scene, show: Show, number: int, head: int) -> float | None:
    """The mean entropy of a head's attention in nats, over the queries; None if that would take too long."""
    values: HeadValues
    if scene.view.kind == "tensor":
        return scene.view.values(show, number, head).mean_entropy() if show == "weights" else None
    layer = _attention_layer(scene, show, number)
    if layer.q.shape[-1] == 1 and layer.form is not None:
        values = flat_values(layer, head - 1)
    else:
        values = head_values(layer, head - 1, "weights")
    short = layer.length <= options.MASS_LENGTH and not layer.reads_rows
    return values.mean_entropy() if values.closed or short else None


def other_layers(scene: Scene, show: str) -> list[Layer] | None:
    """The layers on a second input, if the context dependence needs them and there is such an input."""
    view = scene.view
    if not isinstance(view, ModelView) or view.shown is None or scene.length > options.MAP_LENGTH:
        return None
    depends = show in ("scores", "weights") or (show == "bias" and not view.static)
    return view.other_layers() if depends else None


def layer_overview(
    scene: Scene, show: Show, number: int, others: list[Layer] | None, side: int = SIDE
) -> replies.LayerSummary:
    """One line of the overview; `others` are the layers on another input, for the context dependence.

    `side` is the number of cells per side of its small maps.
    """
    uniformity, context = _measures(scene, show, number, None if others is None else others[number - 1])
    mass = mass_of_layer(scene, show, number)
    heads: list[replies.HeadSummary] = []
    for place in range(len(uniformity)):
        heads.append(
            {
                "head": place + 1,
                **_class(mass, place),
                "entropy": _entropy(scene, show, number, place + 1),
                "uniformity": uniformity[place],
                "context_dependence": context[place],
                **thumbnail(scene, show, number, place + 1, side),
                "profile": _mass_bins(mass, place, OVERVIEW_BINS),
            }
        )
    return {"layer": number, "heads": heads}


def _measures(scene: Scene, show: Show, number: int, other: Layer | None) -> tuple[Ratios, Ratios]:
    """Uniformity and context dependence of each head; None where they are not measured."""
    view, nothing, zeros = scene.view, [None] * scene.heads, [0.0] * scene.heads
    if view.kind == "tensor":
        return compute_map(view.all_values(show, number), show, pixels=SIDE).uniformity.heads, [*nothing]  # type: ignore[arg-type]
    layer = view.layer(show, number)
    if (show == "bias" and layer.even_by_distance) or (show == scene.default_show and scene.by_distance):
        return [1.0] * layer.heads, [0.0] * layer.heads
    static: Ratios = [*zeros] if show == "bias" and view.static else [*nothing]
    if show not in get_args(Quantity) or layer.length > options.MAP_LENGTH:
        return [*nothing], static
    measured = map_of_layer(layer, show, other, SIDE)  # type: ignore[arg-type]
    return measured.uniformity.heads, static if measured.context is None else measured.context.heads


def _class(mass: LayerMass | None, head: int) -> replies.HeadClass:
    if mass is None:
        return {"class": None, "half_distance": None, "decay": None, "sink": None}
    classed = mass.classes[head]
    decay = classed.parameters.get("b") if classed.curve in ("exponential", "power") else None
    return {"class": classed.kind, "half_distance": classed.half_distance, "decay": decay, "sink": classed.sink}


def _mass_bins(mass: LayerMass | None, head: int, most: int) -> replies.MassByDistance:
    """The attention mass per distance in logarithmic bins, without the sink."""
    if mass is None:
        return {"distance": [], "mass": []}
    profile = mass.profile
    return _bins(profile.by_distance[head].numpy(), int(profile.distances[0]), profile.length, most)


def _bins(values: NDArray[np.float64], lowest: int, length: int, most: int) -> replies.MassByDistance:
    edges = distance_edges(length, True, lowest == 0)
    while len(edges) - 1 > most:
        edges = np.append(edges[:-1:2], edges[-1])
    return {"distance": edges[:-1].tolist(), "mass": bin_means(values, edges, lowest).tolist()}


def thumbnail(scene: Scene, show: str, number: int, head: int, side: int = SIDE) -> replies.Thumbnail:
    """The small map of a head with its colours."""
    head_map = scene.head_map(show, number, head)
    scale = colour_scale(head_map, show, scene.both_signs(show))
    return {**_colours(head_map, scale), "map": small_map(head_map, scale, side)}


def small_map(head_map: HeadMap, scale: ColourScale, side: int = SIDE) -> str:
    """The means of a map on side × side cells, as bytes in base64: 0 for no value, 1…255 from first to last colour."""
    level = head_map.level_of(2 * side)
    cells, count = head_map.grid(level), head_map.cells_at(level)
    edges, place = np.linspace(0, count, side + 1), np.arange(count)
    first, last = edges[:-1, None], edges[1:, None]
    overlap = np.clip(np.minimum(last, place + 1) - np.maximum(first, place), 0, 1)  # of parts and cells: (side, cells)
    total, seen = (overlap @ x.double().numpy() @ overlap.T for x in (cells.total, cells.seen))
    empty = seen <= 1e-9
    mean = np.where(empty, np.nan, total / np.where(empty, 1.0, seen))
    return base64.b64encode(quantised(mean, *scale.ends, scale.log).tobytes()).decode("ascii")


def quantised(values: NDArray[Any], low: float, high: float, log: bool) -> NDArray[np.uint8]:
    """Values as bytes: 0 for NaN, 1…255 from the lowest to the highest, by logarithm where it is logarithmic."""
    if log:
        values, low, high = np.log(np.maximum(values, low)), math.log(low), math.log(high)
    share = (values - low) / (high - low) if high > low else np.where(np.isnan(values), np.nan, 0.5)
    places = 1 + np.clip(np.nan_to_num(share), 0, 1) * 254
    return np.where(np.isnan(share), 0, np.rint(places)).astype(np.uint8)


def head_details(
    scene: Scene, show: str, number: int, head: int, with_mass: bool = True, plain: bool = False
) -> replies.HeadDetail:
    """What the page shows beside the map of a head; the mass and the class take long at great lengths."""
    head_map, kind = scene.head_map(show, number, head), scene.check_show(show)
    mass = mass_of_layer(scene, kind, number) if with_mass else None
    values = head_map.values
    distances = torch.tensor(spread(0 if values.causal else 1 - values.length, values.length - 1, PROFILE_POINTS))
    low, mean, high = (x.tolist() for x in values.profile(distances).float())
    profile: replies.Profile = {"distance": distances.tolist(), "mean": mean, "low": low, "high": high}
    return {
        **ranges(head_map, show, scene.both_signs(show), plain),
        "class": None if mass is None else mass.classes[head - 1].as_json(),
        "profile": profile,
        "mass": None if mass is None else _mass(mass, head - 1),
        "caption": f"{sentence(show)}, layer {number}, head {head}. {scene.caption}",
        "alt": _alternative(scene, show, number, head, profile, mass),
    }


def sentence(show: str) -> str:
    """A kind of values at the beginning of a sentence."""
    return WORDS[show][:1].upper() + WORDS[show][1:]


def _mass(mass: LayerMass, head: int) -> replies.Mass:
    classed = mass.classes[head]
    fitted = _bins(classed.fitted_mass.numpy(), 0, mass.profile.length, DETAIL_BINS)
    bins = _mass_bins(mass, head, DETAIL_BINS)
    return {**bins, "fitted": fitted["mass"], "fitted_distance": fitted["distance"], "sink": classed.sink}


def _alternative(
    scene: Scene, show: str, number: int, head: int, profile: replies.Profile, mass: LayerMass | None
) -> str:
    """A sentence or two in place of the map."""
    low, high = scene.head_map(show, number, head).range
    causal = ", each query with the keys up to its own" if scene.view.causal else ""
    text = (
        f"Heat map of {WORDS[show]} of head {head} in layer {number}, {scene.length:,} queries by {scene.length:,} keys"
        f"{causal}: values from {low:.4g} to {high:.4g}."
    )
    near, far = profile["mean"][0], profile["mean"][-1]
    if scene.view.causal and near is not None and far is not None and math.isfinite(near) and math.isfinite(far):
        text += f" The mean is {near:.4g} at distance 0 and {far:.4g} at distance {profile['distance'][-1]:,}."
    if mass is not None:
        classed = mass.classes[head - 1]
        half = "" if classed.half_distance is None else f", half of it within {classed.half_distance:,} tokens"
        text += f" Attention: {classed.kind}{half}; {classed.sink:.0%} goes to the first token."
    return text
