"""One head in detail: range, colours, profile, mass, class, and a text in place of the map."""

import math
from typing import Any

from relpos.explorer.measures import LayerMass, colours, mass_of_layer, profile
from relpos.explorer.overview import mass_bins
from relpos.explorer.scenes import Scene
from relpos.maps.pyramid import HeadMap
from relpos.pictures.captions import SHOWN

WORDS = {**SHOWN, "position": "the positional part of the scores", "flat": "the softmax of the bias over equal content"}
MASS_POINTS = 256


def head_details(scene: Scene, show: str, number: int, head: int, with_mass: bool = True) -> dict[str, Any]:
    """What the page shows beside the map of a head.

    Args:
        scene: The scene.
        show: The kind of values.
        number: The layer; 1 is the first.
        head: The head; 1 is the first.
        with_mass: Whether to compute the attention mass and the class, which takes long at great lengths.
    """
    head_map = scene.head_map(show, number, head)
    mass = mass_of_layer(scene, show, number) if with_mass else None
    values = profile(head_map.values)
    return {
        **ranges(head_map, show),
        "class": None if mass is None else mass.classes[head - 1].as_json(),
        "profile": values,
        "mass": _mass(mass, head - 1),
        "caption": f"{WORDS[show][:1].upper()}{WORDS[show][1:]}, layer {number}, head {head}. {scene.caption}",
        "alt": _alternative(scene, show, number, head, head_map, mass, values),
    }


def ranges(head_map: HeadMap, show: str) -> dict[str, Any]:
    """The range of the colours, with and without the first key."""
    shown = colours(show, *head_map.range)
    without = colours(show, *head_map.range_without_sink)
    return {**shown, "low_without_sink": without["low"], "high_without_sink": without["high"]}


def _mass(mass: LayerMass | None, head: int) -> dict[str, Any] | None:
    if mass is None:
        return None
    classed = mass.classes[head]
    fitted = mass.profile.__class__(
        **{
            **vars(mass.profile),
            "causal": True,
            "distances": mass.profile.distances[mass.profile.distances >= 0],
            "by_distance": classed.fitted_mass[None],
        }
    )
    bins = mass_bins(mass, head, MASS_POINTS)
    predicted = mass_bins(LayerMass(fitted, []), 0, MASS_POINTS)
    return {
        **bins,
        "fitted": predicted["mass"],
        "fitted_distance": predicted["distance"],
        "sink": classed.sink,
    }


def _alternative(
    scene: Scene, show: str, number: int, head: int, head_map: HeadMap, mass: LayerMass | None, values: dict[str, Any]
) -> str:
    """A sentence or two in place of the map."""
    low, high = head_map.range
    text = (
        f"Heat map of {WORDS[show]} of head {head} in layer {number}, {scene.length:,} queries by {scene.length:,} keys"
        f"{', each query with the keys up to its own' if scene.causal else ''}: values from {low:.4g} to {high:.4g}."
    )
    near, far = float(values["mean"][0]), float(values["mean"][-1])
    if scene.causal and math.isfinite(near) and math.isfinite(far):
        text += f" The mean is {near:.4g} at distance 0 and {far:.4g} at distance {values['distance'][-1]:,}."
    if mass is not None:
        classed = mass.classes[head - 1]
        half = "" if classed.half_distance is None else f", half of it within {classed.half_distance:,} tokens"
        text += f" Attention: {classed.kind}{half}; {classed.sink:.0%} goes to the first token."
    return text
