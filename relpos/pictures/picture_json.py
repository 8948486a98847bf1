"""The numbers of a picture, as they are written to the JSON file beside it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from relpos.maps.map import Map
from relpos.pictures.head_notes import head_note
from relpos.pictures.heatmaps import bar_ticks
from relpos.pictures.subjects import Subject
from relpos.system.files import write_bytes
from relpos.system.versions import versions

PACKAGES = ("torch", "numpy", "matplotlib")  # whose versions are recorded


def save_json(path: Path, numbers: dict[str, Any]) -> Path:
    """Write the numbers of a picture to a file, creating its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, (json.dumps(numbers, indent=1, ensure_ascii=False) + "\n").encode())
    return path


def picture_numbers(
    subject: Subject, maps: Sequence[Map], figure: Figure, heads: Sequence[int], seed: int
) -> dict[str, Any]:
    """What was drawn and measured, ready for `json.dumps`.

    Args:
        subject: What is drawn.
        maps: One map per layer.
        figure: The drawn figure, for the ticks of its colour bars.
        heads: The drawn heads; 0 is the first.
        seed: The seed of the picture.

    Returns:
        The subject, its input and training, versions, and per layer and head the range, ticks and measures.
    """
    bars = bar_ticks(figure)
    ticks = dict(zip(heads, bars if len(bars) > 1 else bars * len(heads), strict=False))
    return {
        "encoding": subject.encoding,
        "shows": maps[0].show,
        "causal": maps[0].causal,
        "length": maps[0].length,
        "cell": maps[0].cell,
        **subject.about,
        "seed": seed,
        "versions": versions(PACKAGES),
        "layers": [_layer_numbers(layer_map, ticks) for layer_map in maps],
    }


def _layer_numbers(layer_map: Map, ticks: dict[int, list[float]]) -> dict[str, Any]:
    """The numbers of one layer; `ticks` are those of the heads' colour bars."""
    heads = []
    for head in range(layer_map.heads):
        low, high = layer_map.range(head)
        entry: dict[str, Any] = {"head": head + 1, "minimum": low + 0.0, "maximum": high + 0.0}  # no −0
        if head in ticks:
            entry["ticks"] = [tick + 0.0 for tick in ticks[head]]
        entry["uniformity"] = layer_map.uniformity.heads[head]
        entry["context_dependence"] = None if layer_map.context is None else layer_map.context.heads[head]
        entry["note"] = head_note(layer_map, head)
        heads.append(entry)
    return {
        "layer": layer_map.layer,
        "uniformity": layer_map.uniformity.overall,
        "context_dependence": None if layer_map.context is None else layer_map.context.overall,
        "heads": heads,
    }
