"""The numbers behind a picture as named arrays, and the .npz and .safetensors files they are written to.

A name is `layer4.mean`: the layer, and what the array holds. Of several encodings or models, the label in the legend
comes first: `kerple_log.layer1.mean`. All heads are there, also those that were not drawn.
"""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from relpos.maps.heads.head_classes import HeadClass
from relpos.maps.heads.mass_profiles import MassProfile
from relpos.maps.heads.positional_part import RotationKernel, ScoreProfile
from relpos.maps.map import Map
from relpos.system.files import write_bytes

Arrays = dict[str, NDArray[Any]]
ARRAY_FORMATS = (".npz", ".safetensors")
AXES = {  # what an array holds: its axes. docs/figures.md has the meanings and units
    "minimum": ("heads", "queries", "keys"),
    "mean": ("heads", "queries", "keys"),
    "maximum": ("heads", "queries", "keys"),
    "distances": ("distances",),
    "profile_minimum": ("heads", "distances"),
    "profile_mean": ("heads", "distances"),
    "profile_maximum": ("heads", "distances"),
    "offset_bias": ("heads", "rows", "columns"),
    "mass": ("heads", "distances"),
    "first_key": ("heads",),
    "sink": ("heads",),
    "fitted_mass": ("heads", "absolute distances"),
    "mean_score": ("heads", "distances"),
    "standard_deviation": ("heads", "distances"),
    "kernel": ("heads", "distances"),
    "frequencies": ("bands",),
    "amplitude": ("heads", "bands"),
    "phase": ("heads", "bands"),
    "constant": ("heads",),
}
SMALL = 4096  # values of an array up to which a JSON file has them


def map_arrays(maps: Sequence[Map], label: str = "") -> Arrays:
    """The cells and profiles of heat maps; `label` is that of one subject among several."""
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
        arrays |= _named(layer_map.layer, values, f"{label}." if label else "")
    return arrays


def offset_arrays(numbers: Sequence[int], tables: Sequence[Tensor]) -> Arrays:
    """The bias over 2-D offsets of some layers."""
    arrays: Arrays = {}
    for number, table in zip(numbers, tables, strict=True):
        arrays |= _named(number, {"offset_bias": table.float()})
    return arrays


def mass_arrays(profiles: Sequence[MassProfile], classes: Sequence[Sequence[HeadClass]]) -> Arrays:
    """The attention mass of some layers by distance, and the curves fitted to it."""
    arrays: Arrays = {}
    for profile, heads in zip(profiles, classes, strict=True):
        values = {
            "distances": profile.distances,
            "mass": profile.by_distance,
            "first_key": profile.first_key,
            "sink": profile.sink,
            "fitted_mass": np.stack([head.fitted_mass.numpy() for head in heads]),
        }
        arrays |= _named(profile.layer, values)
    return arrays


def position_arrays(scores: ScoreProfile, kernel: RotationKernel | None) -> Arrays:
    """The scores of a layer by distance, and the kernel of its rotation if there is one."""
    values = {"distances": scores.distances, "mean_score": scores.mean, "standard_deviation": scores.deviation}
    if kernel is not None:
        values["kernel"] = kernel.total(scores.distances)
        values |= {name: getattr(kernel, name) for name in ("frequencies", "amplitude", "phase", "constant")}
    return _named(scores.layer, values)


def _named(layer: int, values: Mapping[str, Any], prefix: str = "") -> Arrays:
    return {
        f"{prefix}layer{layer}.{name}": x.detach().cpu().numpy() if isinstance(x, Tensor) else x
        for name, x in values.items()
    }


def describe_arrays(arrays: Arrays) -> dict[str, dict[str, Any]]:
    """The arrays as a JSON file has them: axes and shape of each, and the values of the small ones.

    Returns:
        One entry per name. `values` is a nested list with None for NaN, or None if there are more than `SMALL`.
    """
    return {
        name: {
            "axes": list(AXES[name.rpartition(".")[2]]),
            "shape": list(x.shape),
            "values": _listed(x) if x.size <= SMALL else None,
        }
        for name, x in arrays.items()
    }


def _listed(x: NDArray[Any]) -> Any:
    """An array as nested lists; float32 with as many digits as it has, None for NaN."""
    if x.ndim > 1:
        return [_listed(row) for row in x]
    if x.dtype.kind != "f":
        return x.tolist()
    return [float(str(value)) + 0.0 if np.isfinite(value) else None for value in x]


def save_arrays(path: Path, arrays: Arrays, about: Mapping[str, Any]) -> Path:
    """Write arrays to a .npz or .safetensors file, creating its folder.

    Args:
        path: The file; its suffix is the format.
        arrays: The arrays by name.
        about: What was drawn. A .npz file has it as the string `about` (JSON), a .safetensors file in its metadata.
    """
    text = json.dumps(about, ensure_ascii=False)
    if path.suffix.lower() == ".safetensors":
        from safetensors.numpy import save  # comes with transformers, which drawing an encoding does not need

        data = bytes(save({name: np.ascontiguousarray(x) for name, x in arrays.items()}, {"about": text}))
    else:
        file = io.BytesIO()
        named: Any = {**arrays, "about": np.array(text)}
        np.savez_compressed(file, **named)
        data = file.getvalue()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, data)
    return path
