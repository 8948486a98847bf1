"""Heat maps: all heads of a layer as in the paper's appendix, and a contact sheet of all layers."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from relpos.view.captions import SPAN_OF_FLAT, ZERO, note
from relpos.view.colours import LEAST_WEIGHT, Colours, linear_ticks, tick_words
from relpos.view.figures import NAME, TICK, TITLE, WIDTHS, Page, position_ticks, position_word, text_scale, text_width
from relpos.view.maps import Map

COLUMNS = 3  # of panels
BAR, LABEL = 0.085, 4.5  # inches a colour bar is wide, points of a token's name
DOWN, ACROSS = "query position", "key position"  # the names of the axes
LEAST_BESIDE = 0.58  # inches beside a panel, for its colour bar and the numbers on it
LOG_LABEL = 0.3  # inches that a power of ten is wide


def draw_heads(
    found: Map,
    chosen: Sequence[int] | None = None,
    caption: str = "",
    labels: Sequence[str] | None = None,
    shared: bool = False,
    width: float = WIDTHS[2],
    banner: str = "",
) -> Figure:
    """One panel per head, three in a row, each with its own colour bar, or one for all of them.

    Args:
        found: The map of a layer.
        chosen: Heads to draw, 0 is the first; all unless given.
        caption: Printed below.
        labels: Names of the tokens, in place of their positions.
        shared: One colour scale for all panels.
        width: Of the page, in inches.
        banner: Printed above.

    Returns:
        The page.
    """
    heads = list(range(found.heads)) if chosen is None else list(chosen)
    columns = min(COLUMNS, len(heads))
    scale = text_scale(width)
    colours = Colours([found], heads, shared)
    named = 0.17 * scale  # room for an axis' name, on the left and at the bottom of the page
    longest = max((len(label) for label in labels or ()), default=0)
    if labels is None:
        numbers = 0.1 * scale + text_width(position_word(found.length - 1, found.length), TICK * scale)
    else:
        numbers = scale * (0.1 + LABEL / 72 * 0.62 * longest)
    below = numbers if labels else 0.2 * scale
    beside = _beside(found, heads, colours, scale)
    title = 0.2 * scale
    space = width - named - beside * shared
    across = space / max(columns, 2 if labels is None else 1)  # one head alone takes half a page
    side = across - numbers - (0.1 * scale if shared else beside)
    down = title + side + below
    rows = math.ceil(len(heads) / columns)
    page = Page(named + across * columns + beside * shared, down * rows + named, scale, caption, banner)
    for place, head in enumerate(heads):
        left, top = named + place % columns * across + numbers, place // columns * down + title
        axes = page.put(left, top, side, side)
        image = draw_map(axes, found, head, colours)
        _name_positions(axes, found.length, labels, scale, side)
        said = note(found, head)
        axes.set_title(
            f"Head {head + 1}" + (f": {said}" if said else ""), pad=3 * scale, fontsize=(TITLE - bool(said)) * scale
        )
        if place % columns == 0:
            axes.set_ylabel(DOWN, fontsize=NAME * scale, labelpad=2 * scale)
        if place + columns >= len(heads):
            axes.set_xlabel(ACROSS, fontsize=NAME * scale, labelpad=1 * scale)
        if not shared:
            draw_bar(page, left + side + 0.06 * scale, top, side, image, colours.range(found, head))
    if shared:
        left = named + across * columns
        draw_bar(page, left, title, min(side, 3 * scale), image, colours.range(found, heads[0]))
    return page.figure


def draw_sheet(
    maps: Sequence[Map],
    chosen: Sequence[int] | None = None,
    caption: str = "",
    shared: bool = False,
    width: float = WIDTHS[2],
    banner: str = "",
) -> Figure:
    """A contact sheet: one row per layer, one column per head, the range of each printed below it."""
    heads = list(range(maps[0].heads)) if chosen is None else list(chosen)
    scale = text_scale(width)
    names, title, beside = 0.25 * scale, 0.2 * scale, _beside(maps[0], heads, Colours(maps, heads, True), scale)
    side = (width - names - beside * shared) / max(len(heads), 4)
    roomy = side > 0.4
    head_size = min(TITLE * scale, max(5.0, 8 * side + 2))
    ranges = [[_range_words(found, head) for head in heads] for found in maps]
    widest = max(text_width(line, 1.0) for row in ranges for words in row for line in words.split("\n"))
    small = min(TICK, 0.9 * side / widest)  # so that no number reaches into the next column
    below = 0.03 if shared else small * 2 * 1.3 / 72 + 0.03
    high = title + (side + below) * len(maps) + 0.2 * scale
    page = Page(names + side * len(heads) + beside * shared, high, scale, caption, banner)
    colours = Colours(maps, heads, shared)
    for row, found in enumerate(maps):
        for column, head in enumerate(heads):
            axes = page.put(names + column * side, title + row * (side + below), 0.93 * side, 0.93 * side)
            image = draw_map(axes, found, head, colours)
            axes.set(xticks=[], yticks=[])
            if not shared:
                axes.set_xlabel(ranges[row][column], fontsize=small, labelpad=1, linespacing=1.1)
            if row == 0:
                axes.set_title(f"{'Head ' * roomy}{head + 1}", fontsize=head_size, pad=2)
            if column == 0:
                axes.set_ylabel(f"{'Layer ' * roomy}{found.layer}", fontsize=head_size, labelpad=2)
    words = f"{DOWN} (down), {ACROSS} (across)"
    place = 1 - (page.top + high - 0.17 * scale) / page.height
    page.figure.text(0.5, place, words, size=TICK * scale, ha="center", va="top")
    if shared:
        left = names + side * len(heads) + 0.05
        high = min(len(maps) * side, 3 * scale)
        draw_bar(page, left, title, high, image, colours.range(maps[0], heads[0]))
    return page.figure


def draw_map(axes: Axes, found: Map, head: int, colours: Colours) -> Any:
    """One head: row 0 on top, what is not seen left blank. The mean of a cell is drawn."""
    values: NDArray[np.float32] = np.ma.masked_invalid(found.mean[head])
    if colours.weights:
        values = np.ma.maximum(values, LEAST_WEIGHT)
    end = len(values) * found.cell - 0.5
    image = axes.imshow(
        values,
        cmap=colours.colours(found, head),
        norm=colours.norm(found, head),
        extent=(-0.5, end, end, -0.5),
        interpolation="auto",  # cells that are smaller than a dot are averaged, larger ones stay sharp
    )
    axes.set(xlim=(-0.5, found.length - 0.5), ylim=(found.length - 0.5, -0.5))
    return image


def draw_bar(page: Page, left: float, top: float, height: float, image: Any, span: tuple[float, float]) -> None:
    """A colour bar that shows what occurs, with absolute values on it."""
    axes = page.put(left, top, BAR * page.scale, height, "<colorbar>")
    bar = page.figure.colorbar(image, cax=axes)
    bar.outline.set_linewidth(0.6 * page.scale)
    low, high = span
    if not isinstance(image.norm, LogNorm):
        ticks = linear_ticks(low, high)
        bar.set_ticks(ticks, labels=tick_words(ticks))
    bar.ax.set_ylim(low if low < high else high - 0.01 * SPAN_OF_FLAT, high)  # of one value: one colour
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=TICK * page.scale)


def bar_ticks(figure: Figure) -> list[list[float]]:
    """The ticks that each colour bar shows, read from the drawn figure."""
    bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    shown = []
    for axes in bars:
        low, high = sorted(axes.get_ylim())
        margin = 1e-6 * (high - low)
        shown.append([float(tick) for tick in axes.get_yticks() if low - margin <= tick <= high + margin])
    return shown


def _beside(found: Map, heads: Sequence[int], colours: Colours, scale: float) -> float:
    """Inches that a colour bar takes with the widest of its numbers."""
    if colours.weights:
        return max(LEAST_BESIDE, 0.25 + LOG_LABEL) * scale
    texts = [text for head in heads for text in tick_words(linear_ticks(*colours.range(found, head)))]
    return max(LEAST_BESIDE * scale, 0.27 * scale + max(text_width(text, TICK * scale) for text in texts))


def _name_positions(axes: Axes, length: int, labels: Sequence[str] | None, scale: float, side: float) -> None:
    """Ticks on both axes of a panel `side` inches wide: positions, or the names of the tokens."""
    if labels is not None:
        for axis, turn in ((axes.xaxis, 90), (axes.yaxis, 0)):
            axis.set_ticks(range(length), labels, rotation=turn, fontsize=LABEL * scale, family="monospace")
            for label in axis.get_ticklabels():
                label.set_parse_math(False)  # a token may be a dollar sign
        return
    ticks, texts = position_ticks(length, side, scale)
    axes.set_xticks(ticks, texts)
    axes.set_yticks(ticks, texts)


def _range_words(found: Map, head: int) -> str:
    """The smallest and the largest value of a head on two lines; what is noted of it where it does nothing."""
    low, high = found.range(head)
    return ZERO.replace("bias ", "") if note(found, head) == ZERO else f"{_short(low)}\n{_short(high)}"


def _short(value: float) -> str:
    """Three digits, or all before the point, with a true minus, and none before 0."""
    text = f"{value:.0f}" if 1000 <= abs(value) < 1e5 else f"{value + 0.0:.3g}"
    return text.replace("-", "−")
