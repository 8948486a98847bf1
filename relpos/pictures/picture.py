"""A picture and the numbers behind it: named arrays for .npz and .safetensors files, and measures for a JSON file.

The name of an array is `layer4.mean`: the layer, and what the array holds. Of several encodings or models, the label in
the legend comes first: `kerple_log.layer1.mean`. All heads are there, also those that were not drawn.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from relpos.maps.distance_profiles import MassProfile
from relpos.maps.head_classes import HeadClass
from relpos.maps.map import Map
from relpos.maps.subject import View
from relpos.pictures.captions import head_note, latex
from relpos.pictures.draw_options import ARRAY_FORMATS, CAPTION_FORMAT, check_files
from relpos.pictures.map_figures import bar_ticks
from relpos.pictures.printed_page import write
from relpos.system.files import write_bytes
from relpos.system.versions import versions

PACKAGES = ("torch", "numpy", "matplotlib")  # whose versions are recorded
Arrays = dict[str, NDArray[Any]]
AXES = {  # of each array. docs/figures.md has the meanings and units
    name: axes
    for axes, array_names in {
        ("heads", "queries", "keys"): "minimum mean maximum",
        (
            "heads",
            "distances",
        ): "profile_minimum profile_mean profile_maximum mass mean_score standard_deviation kernel",
        ("heads", "absolute distances"): "fitted_mass",
        ("heads", "rows", "columns"): "offset_bias",
        ("heads", "bands"): "amplitude phase",
        ("heads",): "first_key sink constant",
        ("distances",): "distances",
        ("bands",): "frequencies",
    }.items()
    for name in array_names.split()
}
SMALL = 4096  # values of an array up to which a JSON file has them


@dataclass(frozen=True)
class Picture:
    """A drawn figure and the numbers behind it. A notebook displays it.

    Attributes:
        figure: The matplotlib figure.
        maps: One per layer, or one per encoding: `mean`, minimum and maximum of each cell, (heads, cells, cells).
        caption: The text below the figure; of a picture without a caption, the text that would be there.
        numbers: What was drawn and measured, as in the JSON file.
        arrays: Every array behind the figure by name, as in the .npz file: "layer1.mean" of a heat map, (heads,
            queries, keys); "layer1.mass", (heads, distances). docs/figures.md lists names, shapes and units.
        profiles: One per layer, if the mass is drawn.
        classes: The class of each head, if the mass is drawn.
    """

    figure: Figure
    maps: list[Map]
    caption: str
    numbers: dict[str, Any]
    arrays: Arrays
    profiles: list[MassProfile] = field(default_factory=list)
    classes: list[list[HeadClass]] = field(default_factory=list)

    def save(self, path: str | Path) -> Path:
        """Write the figure or its numbers to a file, creating its folder.

        Args:
            path: A .png, .pdf or .svg file for the figure. A .json file for the numbers, with the names and shapes of
                the arrays and the values of small ones; a .npz or .safetensors file for all arrays. A .txt file for
                the caption, ready for LaTeX.

        Returns:
            The path.

        Raises:
            ValueError: The name has another ending.
        """
        file = Path(path)
        check_files(file)
        suffix = file.suffix.lower()
        if suffix == ".json":
            numbers = {**self.about, "arrays": describe_arrays(self.arrays)}
            data = (json.dumps(numbers, indent=1, ensure_ascii=False) + "\n").encode()
        elif suffix in ARRAY_FORMATS:
            data = _array_file(suffix, self.arrays, json.dumps(self.about, ensure_ascii=False))
        elif suffix == CAPTION_FORMAT:
            data = f"{latex(self.caption)}\n".encode()
        else:
            data = write(self.figure, suffix)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, data)
        return file

    @property
    def about(self) -> dict[str, Any]:
        """The numbers with the caption before them, as text and for LaTeX: what the files say of the picture."""
        return {"caption": self.caption, "caption_latex": latex(self.caption), **self.numbers}

    def _repr_png_(self) -> bytes:
        return write(self.figure, ".png")


def layer_arrays(layer: int, values: Mapping[str, Any], label: str = "") -> Arrays:
    """The arrays of a layer by name; `label` is that of one view among several."""
    prefix = f"{label}." if label else ""
    return {
        f"{prefix}layer{layer}.{name}": x.detach().cpu().numpy() if isinstance(x, Tensor) else x
        for name, x in values.items()
    }


def map_arrays(maps: Sequence[Map], label: str = "") -> Arrays:
    """The cells and profiles of heat maps."""
    arrays: Arrays = {}
    for layer_map in maps:
        low, mean, high = layer_map.profile  # (heads, distances) each
        values = {
            "minimum": layer_map.low,
            "mean": layer_map.mean,
            "maximum": layer_map.high,
            "distances": layer_map.distances,
            "profile_minimum": low,
            "profile_mean": mean,
            "profile_maximum": high,
        }
        arrays |= layer_arrays(layer_map.layer, values, label)
    return arrays


def describe_arrays(arrays: Arrays) -> dict[str, dict[str, object]]:
    """The arrays as a JSON file has them: axes and shape of each, and the values of those of at most `SMALL`."""
    return {
        name: {
            "axes": list(AXES[name.rpartition(".")[2]]),
            "shape": list(x.shape),
            "values": _nested_list(x) if x.size <= SMALL else None,
        }
        for name, x in arrays.items()
    }


def _nested_list(x: NDArray[Any]) -> list[Any]:
    """An array as nested lists; float32 with as many digits as it has, None for NaN."""
    if x.ndim > 1:
        return [_nested_list(row) for row in x]
    if x.dtype.kind != "f":
        return list(x.tolist())
    return [float(str(value)) + 0.0 if np.isfinite(value) else None for value in x]


def _array_file(suffix: str, arrays: Arrays, about: str) -> bytes:
    """The contents of an array file, which also says what was drawn: a .npz file as the string `about`."""
    if suffix == ".safetensors":
        from safetensors.numpy import save  # comes with transformers, which drawing an encoding does not need

        return bytes(save({name: np.ascontiguousarray(x) for name, x in arrays.items()}, {"about": about}))
    file = io.BytesIO()
    named: Any = {**arrays, "about": np.array(about)}
    np.savez_compressed(file, **named)
    return file.getvalue()


class HeadNumbers(TypedDict, total=False):
    """A head of a map in a JSON file."""

    head: int  # 1 is the first
    minimum: float
    maximum: float
    ticks: list[float]  # of its colour bar, if it is drawn with one
    uniformity: float | None
    context_dependence: float | None
    note: str | None


class LayerNumbers(TypedDict):
    """A layer of maps in a JSON file."""

    layer: int
    uniformity: float | None
    context_dependence: float | None
    heads: list[HeadNumbers]


def describe_view(view: View, shows: str, causal: bool, length: int, seed: int, **more: object) -> dict[str, Any]:
    """The beginning of the JSON of every picture: what is drawn, its input and training, and versions."""
    values = {"encoding": view.encoding, "shows": shows, "causal": causal, "length": length, **more}
    return {**values, **view.about, "seed": seed, "versions": versions(PACKAGES)}


def head_ticks(figure: Figure, heads: Sequence[int]) -> dict[int, list[float]]:
    """The ticks of the colour bar of each head that is drawn; empty if there are no colour bars."""
    bars = bar_ticks(figure)
    return dict(zip(heads, bars if len(bars) > 1 else bars * len(heads), strict=False))


def map_numbers(view: View, maps: Sequence[Map], ticks: Mapping[int, list[float]], seed: int) -> dict[str, Any]:
    """What was drawn and measured on maps, one per layer: range, ticks and measures of every head."""
    first = maps[0]
    about = describe_view(view, first.show, first.causal, first.length, seed, cell=first.cell)
    return {**about, "layers": [_layer_numbers(layer_map, ticks) for layer_map in maps]}


def _layer_numbers(layer_map: Map, ticks: Mapping[int, list[float]]) -> LayerNumbers:
    context = layer_map.context
    heads: list[HeadNumbers] = []
    for head in range(layer_map.heads):
        low, high = layer_map.range(head)
        entry: HeadNumbers = {"head": head + 1, "minimum": low + 0.0, "maximum": high + 0.0}  # no −0
        if head in ticks:
            entry["ticks"] = [tick + 0.0 for tick in ticks[head]]
        entry["uniformity"] = layer_map.uniformity.heads[head]
        entry["context_dependence"] = None if context is None else context.heads[head]
        entry["note"] = head_note(layer_map, head)
        heads.append(entry)
    return {
        "layer": layer_map.layer,
        "uniformity": layer_map.uniformity.overall,
        "context_dependence": None if context is None else context.overall,
        "heads": heads,
    }
