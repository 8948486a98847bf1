"""What is shown, as a file: PNG and SVG with the colours and bars of the figures, CSV with the numbers."""

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import MaxNLocator

from relpos.explorer import limits
from relpos.explorer.details import WORDS, ranges
from relpos.explorer.scenes import Scene
from relpos.maps.pyramid import HeadMap
from relpos.pictures.colours import BOTH_SIGNS, ONE_SIGN, linear_ticks, tick_words
from relpos.pictures.head_notes import FLAT_RANGE
from relpos.pictures.map_figures import ACROSS, DOWN, draw_bar
from relpos.pictures.printed_page import NAME, TICK, TITLE, Page, position_word, text_width, write

PIXELS = 512  # most cells per side of a picture
SIDE = 4.2  # inches of a map


@dataclass(frozen=True)
class Region:
    """Queries and keys of a map, first and last included."""

    first_query: int
    last_query: int
    first_key: int
    last_key: int

    @property
    def shape(self) -> tuple[int, int]:
        """Number of queries and keys."""
        return self.last_query - self.first_query + 1, self.last_key - self.first_key + 1


def check_region(region: Region, length: int) -> Region:
    """The region, if it lies in a map.

    Raises:
        ValueError: It does not.
    """
    for what, first, last in (
        ("query", region.first_query, region.last_query),
        ("key", region.first_key, region.last_key),
    ):
        if not 0 <= first <= last < length:
            raise ValueError(f"there are no such positions of a {what}, {first} to {last}: they are 0 to {length - 1}.")
    return region


def draw_region(
    scene: Scene, show: str, number: int, head: int, region: Region, without_sink: bool, suffix: str
) -> bytes:
    """Draw a part of a map as in the figures.

    Args:
        scene: The scene.
        show: The kind of values.
        number: The layer; 1 is the first.
        head: The head; 1 is the first.
        region: What is drawn; it is widened to whole cells.
        without_sink: Whether the first key is left out of the colour scale.
        suffix: .png or .svg.

    Returns:
        The contents of the file.
    """
    head_map = scene.head_map(show, number, head)
    size = 1
    while max(region.shape) > PIXELS * size:
        size *= 2
    values, extent = _cells(head_map, region, size)
    shown = ranges(head_map, show)
    ending = "_without_sink" if without_sink else ""
    low, high = shown[f"low{ending}"], shown[f"high{ending}"]
    norm: Any
    if shown["log"]:
        values, norm = np.ma.maximum(values, low), LogNorm(low, high, clip=True)
    elif shown["colour_map"] == "diverging":
        most = max(-low, high, FLAT_RANGE / 2)
        norm = Normalize(-most, most)
    else:
        norm = Normalize(min(low, high - FLAT_RANGE), high)
    queries, keys = region.shape
    wide = SIDE * keys / max(region.shape)
    tall = SIDE * queries / max(region.shape)
    cell = f" Each cell is the mean of {size} × {size} entries." if size > 1 else ""
    caption = f"{WORDS[show][:1].upper()}{WORDS[show][1:]}. {scene.caption}{cell}"
    labels = 0.2 + text_width(position_word(scene.length - 1, scene.length), TICK)
    bar = 0.35 + max(text_width(word, TICK) for word in [*tick_words(linear_ticks(low, high)), "10−4"])
    page = Page(0.2 + labels + wide + bar, 0.25 + tall + 0.45, 1.0, caption)
    axes = page.put(0.2 + labels, 0.25, wide, tall)
    image = axes.imshow(
        values,
        cmap=BOTH_SIGNS if shown["colour_map"] == "diverging" else ONE_SIGN,
        norm=norm,
        extent=extent,
        interpolation="auto",
        aspect="auto",
    )
    axes.set(
        xlim=(region.first_key - 0.5, region.last_key + 0.5), ylim=(region.last_query + 0.5, region.first_query - 0.5)
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel(ACROSS, fontsize=NAME)
    axes.set_ylabel(DOWN, fontsize=NAME)
    axes.set_title(f"Layer {number}, head {head}", fontsize=TITLE, pad=3)
    draw_bar(page, 0.2 + labels + wide + 0.06, 0.25, tall, image, (low, high))
    return write(page.figure, suffix)


def _cells(head_map: HeadMap, region: Region, size: int) -> tuple[Any, tuple[float, float, float, float]]:
    """The means of the cells that cover a region, and where they lie."""
    row, column = region.first_query // size, region.first_key // size
    rows, columns = region.last_query // size - row + 1, region.last_key // size - column + 1
    level = size.bit_length() - 1
    cells = head_map.cells(level, row, rows, column, columns)
    left, top = column * size - 0.5, row * size - 0.5
    extent = (left, left + columns * size, top + rows * size, top)
    return np.ma.masked_invalid(cells.planes[1].numpy()), extent


def write_csv(scene: Scene, show: str, number: int, head: int, region: Region) -> bytes:
    """The entries of a part of a map, as lines query,key,value.

    Raises:
        ValueError: There are too many.
    """
    queries, keys = region.shape
    if queries * keys > limits.CSV_ENTRIES:
        raise ValueError(
            f"{queries:,} × {keys:,} entries are too many for a table: choose a part of the map with at most "
            f"{limits.CSV_ENTRIES:,}."
        )
    head_values = scene.head_map(show, number, head).values
    values = head_values.block(region.first_query, region.last_query + 1, region.first_key, region.last_key + 1).numpy()
    out = io.StringIO()
    out.write(f"query,key,{show}\n")
    for query, key in zip(*np.nonzero(np.isfinite(values)), strict=True):
        out.write(f"{query + region.first_query},{key + region.first_key},{values[query, key]:.9g}\n")
    return out.getvalue().encode("ascii")
