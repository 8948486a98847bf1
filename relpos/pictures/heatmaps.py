"""Heat maps of the heads of a layer, as in the paper's appendix: panels with colour bars."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from relpos.maps.map import Map
from relpos.pictures.colours import LEAST_WEIGHT, Colours, linear_ticks, tick_words
from relpos.pictures.figures import WIDTHS
from relpos.pictures.head_notes import FLAT_RANGE, head_note
from relpos.pictures.printed_page import NAME, TICK, TITLE, Page, position_ticks, position_word, text_scale, text_width

COLUMNS = 3  # panels beside each other
BAR, LABEL = 0.085, 4.5  # width of a colour bar in inches, size of a token label in points
DOWN, ACROSS = "query position", "key position"  # the labels of the axes
LEAST_BESIDE = 0.58  # inches beside a panel, for its colour bar and the tick labels
LOG_LABEL = 0.3  # width of a power of ten, in inches


def draw_heads(
    layer_map: Map,
    chosen: Sequence[int] | None = None,
    caption: str = "",
    labels: Sequence[str] | None = None,
    shared: bool = False,
    width: float = WIDTHS[2],
    banner: str = "",
) -> Figure:
    """Draw one panel per head, three beside each other, each with its own colour bar or all with a shared one.

    Args:
        layer_map: The map of a layer.
        chosen: Heads to draw; 0 is the first. All by default.
        caption: Text below the panels.
        labels: Names of the tokens, shown instead of their positions.
        shared: Whether all panels share one colour scale.
        width: Width of the page in inches.
        banner: Text above the panels.

    Returns:
        The figure.
    """
    heads = list(range(layer_map.heads)) if chosen is None else list(chosen)
    columns = min(COLUMNS, len(heads))
    scale = text_scale(width)
    colours = Colours([layer_map], heads, shared)
    axis_label = 0.17 * scale  # room on the left and at the bottom of the page
    longest = max((len(label) for label in labels or ()), default=0)
    if labels is None:
        numbers = 0.1 * scale + text_width(position_word(layer_map.length - 1, layer_map.length), TICK * scale)
    else:
        numbers = scale * (0.1 + LABEL / 72 * 0.62 * longest)
    below = numbers if labels else 0.2 * scale
    beside = bar_room(layer_map, heads, colours, scale)
    title = 0.2 * scale
    space = width - axis_label - beside * shared
    across = space / max(columns, 2 if labels is None else 1)  # a single head takes half a page
    side = across - numbers - (0.1 * scale if shared else beside)
    down = title + side + below
    rows = math.ceil(len(heads) / columns)
    page = Page(axis_label + across * columns + beside * shared, down * rows + axis_label, scale, caption, banner)
    for place, head in enumerate(heads):
        left, top = axis_label + place % columns * across + numbers, place // columns * down + title
        axes = page.put(left, top, side, side)
        image = draw_map(axes, layer_map, head, colours)
        _name_positions(axes, layer_map.length, labels, scale, side)
        note = head_note(layer_map, head)
        axes.set_title(
            f"Head {head + 1}" + (f": {note}" if note else ""), pad=3 * scale, fontsize=(TITLE - bool(note)) * scale
        )
        if place % columns == 0:
            axes.set_ylabel(DOWN, fontsize=NAME * scale, labelpad=2 * scale)
        if place + columns >= len(heads):
            axes.set_xlabel(ACROSS, fontsize=NAME * scale, labelpad=1 * scale)
        if not shared:
            draw_bar(page, left + side + 0.06 * scale, top, side, image, colours.range(layer_map, head))
    if shared:
        left = axis_label + across * columns
        draw_bar(page, left, title, min(side, 3 * scale), image, colours.range(layer_map, heads[0]))
    return page.figure


def draw_map(axes: Axes, layer_map: Map, head: int, colours: Colours) -> Any:
    """Draw the mean of every cell of one head: row 0 on top, blank where a query sees no key of the cell."""
    values: NDArray[np.float32] = np.ma.masked_invalid(layer_map.mean[head])
    if colours.weights:
        values = np.ma.maximum(values, LEAST_WEIGHT)
    end = len(values) * layer_map.cell - 0.5
    image = axes.imshow(
        values,
        cmap=colours.colours(layer_map, head),
        norm=colours.norm(layer_map, head),
        extent=(-0.5, end, end, -0.5),
        interpolation="auto",  # cells that are smaller than a dot are averaged, larger ones stay sharp
    )
    axes.set(xlim=(-0.5, layer_map.length - 0.5), ylim=(layer_map.length - 0.5, -0.5))
    return image


def draw_bar(page: Page, left: float, top: float, height: float, image: Any, span: tuple[float, float]) -> None:
    """Draw a colour bar that covers the values `span`, with absolute tick labels."""
    axes = page.put(left, top, BAR * page.scale, height, "<colorbar>")
    bar = page.figure.colorbar(image, cax=axes)
    bar.outline.set_linewidth(0.6 * page.scale)
    low, high = span
    if not isinstance(image.norm, LogNorm):
        ticks = linear_ticks(low, high)
        bar.set_ticks(ticks, labels=tick_words(ticks))
    bar.ax.set_ylim(low if low < high else high - 0.01 * FLAT_RANGE, high)  # a single value has a single colour
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=TICK * page.scale)


def bar_ticks(figure: Figure) -> list[list[float]]:
    """The ticks of each colour bar, read from the drawn figure."""
    bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    shown = []
    for axes in bars:
        low, high = sorted(axes.get_ylim())
        margin = 1e-6 * (high - low)
        shown.append([float(tick) for tick in axes.get_yticks() if low - margin <= tick <= high + margin])
    return shown


def bar_room(layer_map: Map, heads: Sequence[int], colours: Colours, scale: float) -> float:
    """Inches that a colour bar needs, with its widest tick label."""
    if colours.weights:
        return max(LEAST_BESIDE, 0.25 + LOG_LABEL) * scale
    texts = [text for head in heads for text in tick_words(linear_ticks(*colours.range(layer_map, head)))]
    return max(LEAST_BESIDE * scale, 0.27 * scale + max(text_width(text, TICK * scale) for text in texts))


def _name_positions(axes: Axes, length: int, labels: Sequence[str] | None, scale: float, side: float) -> None:
    """Set the ticks of both axes of a panel `side` inches wide: positions, or the names of the tokens."""
    if labels is not None:
        for axis, turn in ((axes.xaxis, 90), (axes.yaxis, 0)):
            axis.set_ticks(range(length), labels, rotation=turn, fontsize=LABEL * scale, family="monospace")
            for label in axis.get_ticklabels():
                label.set_parse_math(False)  # a token may be a dollar sign
        return
    ticks, texts = position_ticks(length, side, scale)
    axes.set_xticks(ticks, texts)
    axes.set_yticks(ticks, texts)
