"""What is shown, as files: one self-contained page; PNG and SVG as in the figures; CSV with the numbers."""

import base64
import io
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.ticker import MaxNLocator

from relpos.explorer import explore_options as options
from relpos.explorer import replies
from relpos.explorer.explorer import STATIC, Explorer
from relpos.explorer.measures import (
    head_details,
    layer_overview,
    other_layers,
    quantised,
    scales,
    sentence,
)
from relpos.explorer.scenes import ExplorerSubject, Scene
from relpos.maps import NO_ATTENTIONS
from relpos.maps.map import ColourScale
from relpos.maps.subject import Show
from relpos.maps.values import one_thread
from relpos.pictures.colours import linear_ticks, tick_words
from relpos.pictures.map_figures import ACROSS, DOWN, draw_bar, draw_cells
from relpos.pictures.printed_page import NAME, TICK, TITLE, Page, position_word, text_width, write

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; worker-src blob:; "
    "font-src data:; base-uri 'none'; form-action 'none'"
)
PIXELS = 512  # most cells per side of a picture
SIDE = 4.2  # inches of a map


@dataclass(frozen=True)
class Room:
    """What an exported page may hold."""

    megabytes: int  # of its maps, in base64
    cells: int  # most cells per side of a map


IN_A_FILE, IN_A_NOTEBOOK = Room(38, 1024), Room(2, 256)


def export_page(
    subjects: Sequence[ExplorerSubject],
    static: Path = STATIC,
    progress: Callable[[float], None] = lambda done: None,
    room: Room = IN_A_FILE,
) -> str:
    """The built page with the first scene of every subject inside: its default values, and others as room allows."""
    if not subjects:
        raise ValueError(f"nothing to export: name an encoding or a model. {NO_ATTENTIONS}")
    files = {name: static / name for name in ("index.html", "app.js", "app.css")}
    for file in files.values():
        if not file.is_file():
            raise FileNotFoundError(f"the page has not been built: {file.name} is missing. Run make explorer.")
    page, script, style = (file.read_text(encoding="utf-8") for file in files.values())
    with one_thread():
        data = replies.to_json(page_data(subjects, progress, room)).decode("ascii").replace("<", "\\u003c")
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
def page_data(
    subjects: Sequence[ExplorerSubject],
    progress: Callable[[float], None] = lambda done: None,
    room: Room = IN_A_FILE,
) -> replies.ExportData:
    """What the page reads instead of asking a server."""
    explorer = Explorer(subjects)
    data: replies.ExportData = {
        "start": {**explorer.start(), "encodings": [], "stories": [], "groups": []},
        "scenes": [],
        "overview": {},
        "heads": {},
        "maps": {},
        "tokens": {},
        "evaluations": {},
    }
    used = 0  # bytes of maps
    for place, subject in enumerate(subjects):
        scene = explorer.make_scene({"subject": subject.id})
        about = data["start"]["subjects"][place]
        reply, shows, largest = scene.as_json(), list[Show](), 0
        order: list[Show] = [scene.default_show, "weights", "bias", "flat", "position", "scores"]
        for show in [show for show in dict.fromkeys(order) if show in scene.shows]:
            left = room.megabytes * 1_000_000 * (place + 1) // len(subjects) - used
            if shows and left < largest:  # as large as another kind of values, by what is known
                break
            held = _held(scene, show, reply["scene"], room.cells, left if shows else None)
            if held is None:
                break
            lines, heads, maps = held
            size = sum(len(stored["cells"]) for stored in maps.values())
            used, largest = used + size, max(largest, size)
            shows.append(show)
            data["overview"][f"{reply['scene']}/{show}"] = lines
            data["heads"] |= heads
            data["maps"] |= maps
            progress((place + len(shows) / len(scene.shows)) / len(subjects))
        data["scenes"].append({**reply, "shows": shows})
        about["shows"], about["can_write"], about["documents"], about["parameters"] = shows, False, [], []
        if scene.view.tokens is not None:
            data["tokens"][reply["scene"]] = scene.view.tokens
        data["evaluations"][str(subject.id)] = subject.evaluation()
    return data


Held = tuple[list[replies.LayerSummary], dict[str, replies.HeadDetail], dict[str, replies.StoredMap]]


def _held(scene: Scene, show: Show, name: str, cells: int, room: int | None) -> Held | None:
    """Overview, details and maps of one kind of values; None if the maps are larger than the room."""
    others = other_layers(scene, show)
    lines: list[replies.LayerSummary] = []
    heads: dict[str, replies.HeadDetail] = {}
    maps: dict[str, replies.StoredMap] = {}
    for number in range(1, scene.depth + 1):
        try:
            lines.append(layer_overview(scene, show, number, others))
        except ValueError as error:  # a layer without such values
            lines.append({"layer": number, "heads": [], "error": str(error)})
        for summary in lines[-1]["heads"]:
            key = f"{name}/{show}/{number}/{summary['head']}"
            heads[key] = head_details(scene, show, number, summary["head"])
            maps[key] = _stored(scene, show, number, summary["head"], cells)
            if room is not None and sum(len(stored["cells"]) for stored in maps.values()) > room:
                return None
    return lines, heads, maps


def _stored(scene: Scene, show: Show, number: int, head: int, most: int) -> replies.StoredMap:
    """A map at its finest level that fits: bytes, compressed, in base64."""
    head_map = scene.head_map(show, number, head)
    level, (low, high), log = head_map.level_of(most), head_map.range, show in ("weights", "flat")
    if log:  # weights below the first colour are stored as that
        scale = ColourScale.of_weights(low, high, head_map.length)
        low, high = scale.low, scale.high
    side = head_map.cells_at(level)
    means = head_map.cells(level, 0, side, 0, side).planes[1].numpy().astype(np.float64)
    cells = base64.b64encode(zlib.compress(quantised(means, low, high, log).tobytes())).decode("ascii")
    return {"level": level, "low": low, "high": high, "log": log, "cells": cells}


@dataclass(frozen=True)
class Region:
    """A part of the map of a head: queries and keys, first and last included."""

    scene: Scene
    show: str
    number: int
    head: int
    first_query: int
    last_query: int
    first_key: int
    last_key: int

    def __post_init__(self) -> None:
        length = self.scene.length
        ends = {"query": (self.first_query, self.last_query), "key": (self.first_key, self.last_key)}
        for what, (first, last) in ends.items():
            if not 0 <= first <= last < length:
                raise ValueError(f"positions {first} to {last} are not those of a {what}: they are 0 to {length - 1}.")

    @property
    def shape(self) -> tuple[int, int]:
        return self.last_query - self.first_query + 1, self.last_key - self.first_key + 1

    def picture(self, without_sink: bool, suffix: str) -> bytes:
        """Draw it as in the figures, widened to complete cells, as .png or .svg."""
        head_map = self.scene.head_map(self.show, self.number, self.head)
        level = 0
        while max(self.shape) > PIXELS << level:
            level += 1
        size = 1 << level
        row, column = self.first_query >> level, self.first_key >> level
        rows, columns = (self.last_query >> level) - row + 1, (self.last_key >> level) - column + 1
        values = head_map.cells(level, row, rows, column, columns).planes[1].numpy()
        scale = scales(head_map, self.show, self.scene.both_signs(self.show))[without_sink]
        queries, keys = self.shape
        wide, tall = SIDE * keys / max(self.shape), SIDE * queries / max(self.shape)
        cell = f" Each cell is the mean of {size} × {size} entries." if size > 1 else ""
        labels = 0.4 + text_width(position_word(self.scene.length - 1, self.scene.length), TICK)
        words = [*tick_words(linear_ticks(scale.low, scale.high)), "10−4"]
        bar = 0.35 + max(text_width(word, TICK) for word in words)
        caption = f"{sentence(self.show)}. {self.scene.caption}{cell}"
        page = Page(labels + wide + bar, 0.25 + tall + 0.45, 1.0, caption)
        axes = page.put(labels, 0.25, wide, tall)
        image = draw_cells(axes, values, row * size, column * size, size, scale, aspect="auto")
        axes.set(xlim=(self.first_key - 0.5, self.last_key + 0.5), ylim=(self.last_query + 0.5, self.first_query - 0.5))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.set_xlabel(ACROSS, fontsize=NAME)
        axes.set_ylabel(DOWN, fontsize=NAME)
        axes.set_title(f"Layer {self.number}, head {self.head}", fontsize=TITLE, pad=3)
        draw_bar(page, labels + wide + 0.06, 0.25, tall, image, scale)
        return write(page.figure, suffix)

    def table(self) -> bytes:
        """Its entries, as lines query,key,value."""
        queries, keys = self.shape
        if queries * keys > options.CSV_ENTRIES:
            raise ValueError(
                f"{queries:,} × {keys:,} entries are too many for a table: choose a part of the map with at most "
                f"{options.CSV_ENTRIES:,}."
            )
        head_values = self.scene.head_map(self.show, self.number, self.head).values
        values = head_values.block(self.first_query, self.last_query + 1, self.first_key, self.last_key + 1).numpy()
        out = io.StringIO()
        out.write(f"query,key,{self.show}\n")
        for query, key in zip(*np.nonzero(np.isfinite(values)), strict=True):
            out.write(f"{query + self.first_query},{key + self.first_key},{values[query, key]:.9g}\n")
        return out.getvalue().encode("ascii")
