"""Two models on one page: three heads of each, one below the other, in one colour map."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from relpos.maps.diagonals import Share
from relpos.maps.map import Map
from relpos.pictures.map_figures import bar_ticks, draw_heads
from relpos.pictures.picture import Arrays, Picture
from relpos.pictures.printed_page import COLOUR_BAR, Look

HEADS = 3  # of each model


def chosen_heads(layer_map: Map, count: int = HEADS) -> list[int]:
    """Heads from the flattest to the deepest, evenly spread by depth; flat ones, which show nothing, come last."""
    ranges = [layer_map.range(head) for head in range(layer_map.heads)]
    depths = [high - low for low, high in ranges]
    by_depth = sorted((head for head, depth in enumerate(depths) if depth > 0), key=depths.__getitem__)
    by_depth = by_depth or list(range(layer_map.heads))
    places = [round(place * (len(by_depth) - 1) / max(count - 1, 1)) for place in range(min(count, len(by_depth)))]
    return [by_depth[place] for place in places]


def join_pictures(pictures: Mapping[str, Picture], title: str) -> Picture:
    """One picture of some heads of two pictures, by the names that the models have in the paper."""
    heads = {name: chosen_heads(picture.maps[0]) for name, picture in pictures.items()}
    maps = {name: picture.maps[0] for name, picture in pictures.items()}
    first = next(iter(pictures.values()))
    joined = _join([(maps[name], heads[name]) for name in pictures])
    names = [f"{name}, head {head + 1}" for name, chosen in heads.items() for head in chosen]
    about = [picture.caption.removeprefix(title).split(" Uniformity along")[0] for picture in pictures.values()]
    above, below = pictures
    heading = f"Heads of {above} (above) and {below} (below), from the flattest to the deepest."
    caption = " ".join([f"{title}{heading}", *about])
    figure = draw_heads(joined, Look(caption=caption))
    panels = [axes for axes in figure.axes if axes.get_label() != COLOUR_BAR]
    for axes, name in zip(panels, names, strict=True):
        axes.title.set_text(name)
    arrays: Arrays = {
        f"{name}.{key}": value for name, picture in pictures.items() for key, value in picture.arrays.items()
    }
    numbers = {**first.numbers, "models": {name: picture.numbers for name, picture in pictures.items()}}
    numbers["layers"] = [_layer(pictures, heads, bar_ticks(figure))]
    return Picture(figure, [joined], caption, numbers, arrays)


def _join(parts: Sequence[tuple[Map, Sequence[int]]]) -> Map:
    """The map of some heads of several maps."""
    first = parts[0][0]

    def heads(field: str, axis: int = 0) -> Any:
        return np.concatenate([getattr(part, field).take(chosen, axis) for part, chosen in parts], axis)

    uniform = Share([part.uniformity.heads[head] for part, chosen in parts for head in chosen], None)
    cells = {field: heads(field) for field in ("low", "mean", "high")}
    return replace(first, **cells, profile=heads("profile", 1), uniformity=uniform, context=None)


def _layer(pictures: Mapping[str, Picture], heads: Mapping[str, list[int]], ticks: list[list[float]]) -> dict[str, Any]:
    """The heads as a layer of the JSON file, each named after its model."""
    rows = []
    for name, picture in pictures.items():
        of_heads = picture.numbers["layers"][0]["heads"]
        rows += [{**of_heads[head], "head": f"{name} {head + 1}"} for head in heads[name]]
    for row, values in zip(rows, ticks, strict=True):
        row["ticks"] = values
    layer = next(iter(pictures.values())).numbers["layers"][0]["layer"]
    return {"layer": layer, "uniformity": None, "context_dependence": None, "heads": rows}
