"""One self-contained page: the built page with the maps, overviews and details of its subjects inside."""

import base64
import json
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relpos.explorer.details import head_details
from relpos.explorer.explorer import STATIC, Explorer
from relpos.explorer.overview import layer_overview, other_layers, quantised
from relpos.explorer.replies import plain
from relpos.explorer.scenes import Scene
from relpos.explorer.subjects import Subject
from relpos.maps.computing import one_thread
from relpos.maps.pyramid import HeadMap

MOST_BYTES = 38_000_000  # of the maps, in base64
CELLS = 1024  # most cells per side of a map
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; worker-src blob:; "
    "font-src data:; base-uri 'none'; form-action 'none'"
)


def export_page(
    subjects: Sequence[Subject], static: Path = STATIC, progress: Callable[[float], None] = lambda done: None
) -> str:
    """Write a page that needs no server.

    It holds the first scene of every subject: its default values, and further kinds as far as there is room.

    Args:
        subjects: What it shows.
        static: The folder of the built page.
        progress: Called with the completed fraction.

    Returns:
        The HTML.

    Raises:
        ValueError: There is nothing to show.
        FileNotFoundError: The page has not been built.
    """
    if not subjects:
        raise ValueError("nothing to export: name an encoding or a model.")
    files = {name: static / name for name in ("index.html", "app.js", "app.css")}
    for file in files.values():
        if not file.is_file():
            raise FileNotFoundError(f"the page has not been built: {file.name} is missing. Run make explorer.")
    page, script, style = (file.read_text(encoding="utf-8") for file in files.values())
    with one_thread():
        contents = plain(page_data(subjects, progress))
    data = json.dumps(contents, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    data = data.replace("<", "\\u003c")
    inline = {
        r"<script\b[^>]*app\.js[^>]*>\s*</script>": "",
        r"<link\b[^>]*app\.css[^>]*>": f"<style>{_harmless('style', style)}</style>",
        r"<link\b[^>]*rel=\"?modulepreload[^>]*>": "",
    }
    for pattern, instead in inline.items():
        page = re.sub(pattern, lambda _, text=instead: text, page)  # type: ignore[misc]
    page = page.replace("<head>", f'<head><meta http-equiv="Content-Security-Policy" content="{POLICY}">', 1)
    ending = (
        f'<script type="application/json" id="relpos-data">{data}</script>\n'
        f'<script type="module">{_harmless("script", script)}</script>\n'
    )
    before, body, after = page.rpartition("</body>")
    return f"{before}{ending}{body}{after}" if body else page + ending


def _harmless(tag: str, text: str) -> str:
    """A script or style that does not end its own tag."""
    return re.sub(f"</({tag})", r"<\\/\1", text, flags=re.IGNORECASE)


@torch.no_grad()
def page_data(subjects: Sequence[Subject], progress: Callable[[float], None] = lambda done: None) -> dict[str, Any]:
    """What the page reads instead of asking a server."""
    explorer = Explorer(subjects)
    start = {**explorer.start(), "encodings": []}
    data: dict[str, Any] = {
        "start": start,
        "scenes": [],
        "overview": {},
        "heads": {},
        "maps": {},
        "tokens": {},
        "evaluations": {},
    }
    used = 0
    for place, subject in enumerate(subjects):
        scene = explorer.make_scene({"subject": subject.id})
        kept: list[str] = []
        for show in _ordered(scene):
            filled = _fill(scene, show, MOST_BYTES * (place + 1) // len(subjects) - used if kept else None)
            if filled is None:
                break
            overview, heads, maps = filled
            used += sum(len(each["cells"]) for each in maps.values())
            kept.append(show)
            data["overview"].update(overview)
            data["heads"].update(heads)
            data["maps"].update(maps)
            progress((place + len(kept) / len(scene.shows)) / len(subjects))
        reply = {**scene.as_json(), "shows": kept}
        data["scenes"].append(reply)
        start["subjects"][place].update(shows=kept, can_write=False, documents=[], parameters=[])
        if scene.tokens is not None:
            data["tokens"][reply["scene"]] = scene.tokens
        data["evaluations"][subject.id] = subject.evaluation()
    return data


def _ordered(scene: Scene) -> list[str]:
    """The kinds of values of a scene, in the order in which they are exported."""
    order = [scene.default_show, "weights", "bias", "flat", "position", "scores"]
    return [show for show in dict.fromkeys(order) if show in scene.shows]


def _fill(scene: Scene, show: str, room: int | None) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]] | None:
    """Overview, details and maps of one kind of values; None if the maps are larger than the room."""
    name = scene.as_json()["scene"]
    second = other_layers(scene, show)
    lines: list[dict[str, Any]] = []
    heads: dict[str, Any] = {}
    maps: dict[str, Any] = {}
    for number in range(1, scene.depth + 1):
        try:
            line = layer_overview(scene, show, number, None if second is None else second[number - 1])
        except ValueError as error:  # a layer without such values
            lines.append({"layer": number, "heads": [], "error": str(error)})
            continue
        lines.append(line)
        for each in line["heads"]:
            key = f"{name}/{show}/{number}/{each['head']}"
            heads[key] = head_details(scene, show, number, each["head"])
            maps[key] = _cells(scene.head_map(show, number, each["head"]), heads[key])
            if room is not None and sum(len(one["cells"]) for one in maps.values()) > room:
                return None
    return {f"{name}/{show}": lines}, heads, maps


def _cells(head_map: HeadMap, details: dict[str, Any]) -> dict[str, Any]:
    """A map at its finest level that fits: bytes, compressed, in base64."""
    level = head_map.level_of(CELLS)
    side = head_map.cells_at(level)
    cells = head_map.cells(level, 0, side, 0, side)
    shown = {name: details[name] for name in ("low", "high", "log")}
    data = quantised(cells.planes[1].numpy().astype(np.float64), shown).tobytes()
    return {"level": level, **shown, "cells": base64.b64encode(zlib.compress(data, 9)).decode("ascii")}
