"""Figures of maps: heat maps of the heads of a layer, of several encodings, and a contact sheet of several layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from relpos.maps.layer import Quantity
from relpos.maps.map import FLAT_RANGE, ColourScale, Map
from relpos.pictures.captions import ZERO, head_note
from relpos.pictures.colours import colour_map, head_scales, linear_ticks, norm, page_scales, tick_words
from relpos.pictures.printed_page import (
    COLOUR_BAR,
    COLUMNS,
    NAME,
    TICK,
    TITLE,
    Grid,
    Look,
    Page,
    position_ticks,
    position_word,
    text_width,
)

BAR, LABEL = 0.085, 4.5  # width of a colour bar in inches, size of a token label in points
DOWN, ACROSS = "query position", "key position"  # the labels of the axes
OFFSETS_DOWN, OFFSETS_ACROSS = "rows, query − key", "columns, query − key"  # of a bias over offsets of image patches
LEAST_BESIDE = 0.58  # inches beside a panel, for its colour bar and the tick labels
LOG_LABEL = 0.3  # width of a power of ten, in inches
BAR_NAMES: Mapping[Quantity, str] = {"bias": "bias", "scores": "score", "weights": "weight"}  # one value of a map
BAR_NAME = 0.15  # inches for the name of a colour bar
MOST_BESIDE = 4  # encodings beside each other; more are drawn below each other


def draw_maps(maps: Sequence[Map], look: Look) -> Figure:
    """Draw the heads of one layer, or a contact sheet of several."""
    return draw_sheet(maps, look) if len(maps) > 1 else draw_heads(maps[0], look)


@dataclass(frozen=True)
class Panel:
    """A head of a map, on a page of several."""

    layer_map: Map
    head: int  # 0 is the first
    title: str
    scale: ColourScale


def draw_heads(layer_map: Map, look: Look) -> Figure:
    """Draw one panel per head, three beside each other, each with its own colour bar or all with a shared one."""
    heads = look.chosen(layer_map.heads)
    panels = []
    for head, scale in zip(heads, head_scales([layer_map], heads, look.shared)[0], strict=True):
        note = head_note(layer_map, head)
        panels.append(Panel(layer_map, head, f"Head {head + 1}" + (f": {note}" if note else ""), scale))
    return draw_panels(panels, look, min(COLUMNS, len(panels)))


def draw_side_by_side(maps: Mapping[str, Map], heads: Sequence[Sequence[int]], look: Look) -> Figure:
    """Draw some heads of several encodings: one column per encoding, or one row for each if there are many."""
    scales = page_scales(list(maps.values()), heads, look.shared)
    rows = [
        [Panel(layer_map, head, f"{label}, head {head + 1}", scale) for head, scale in zip(chosen, of_map, strict=True)]
        for (label, layer_map), chosen, of_map in zip(maps.items(), heads, scales, strict=True)
    ]
    if len(maps) > MOST_BESIDE or len({len(row) for row in rows}) > 1:
        columns = max(map(len, rows))
        return draw_panels([panel for row in rows for panel in [*row, *[None] * (columns - len(row))]], look, columns)
    return draw_panels([panel for row in zip(*rows, strict=True) for panel in row], look, len(maps))


def draw_panels(panels: Sequence[Panel | None], look: Look, columns: int) -> Figure:
    """Draw panels in rows, each with its own colour bar or all with a shared one; None leaves a place empty."""
    drawn = [panel for panel in panels if panel is not None]
    labels, shared, scale = look.labels, look.shared, look.scale
    longest_map = max(panel.layer_map.length for panel in drawn)
    margin = 0.17 * scale  # room for the names of the axes
    longest = max((len(label) for label in labels or ()), default=0)
    if labels is None:
        numbers = 0.1 * scale + text_width(position_word(longest_map - 1, longest_map), TICK * scale)
    else:
        numbers = scale * (0.1 + LABEL / 72 * 0.62 * longest)
    beside, title, name = bar_room([panel.scale for panel in drawn], scale), 0.2 * scale, BAR_NAME * scale
    same = len({panel.layer_map.show for panel in drawn}) == 1  # one name serves all bars of a row
    space = look.width - margin - name - beside * shared
    across = space / max(columns, 2 if labels is None else 1)  # a single head takes half a page
    side = across - numbers - (0.1 * scale if shared else beside)
    down = title + side + (numbers if labels else 0.2 * scale)
    page = Grid(look, len(panels), across, down, columns, left=margin, right=beside * shared + name, below=margin)
    for number, panel in enumerate(panels):
        if panel is None:
            continue
        left, top = page.place(number)
        axes = page.put(left + numbers, top + title, side, side)
        image = draw_map(axes, panel.layer_map, panel.head, panel.scale)
        _name_positions(axes, panel.layer_map.length, labels, scale, side)
        size = min(TITLE - (":" in panel.title), (across - 0.1 * scale) / text_width(panel.title, scale))
        axes.set_title(panel.title, pad=3 * scale, fontsize=size * scale)
        page.name_outer_axes(axes, number, DOWN, ACROSS)
        if not shared:
            beginning = left + numbers + side + 0.06 * scale
            last = number % columns == columns - 1 or number == len(panels) - 1
            named = BAR_NAMES[panel.layer_map.show] if last or not same else ""
            draw_bar(page, beginning, top + title, side, image, panel.scale, named)
    if shared:
        named = BAR_NAMES[drawn[0].layer_map.show] if same else ""
        draw_bar(page, margin + across * columns, title, min(side, 3 * scale), image, drawn[0].scale, named)
    return page.figure


def draw_map(axes: Axes, layer_map: Map, head: int, scale: ColourScale) -> Any:
    """Draw the mean of every cell of one head: row 0 on top, blank where a query sees no key of the cell."""
    image = draw_cells(axes, layer_map.mean[head], 0, 0, layer_map.cell, scale)
    axes.set(xlim=(-0.5, layer_map.length - 0.5), ylim=(layer_map.length - 0.5, -0.5))
    return image


def draw_cells(
    axes: Axes, values: NDArray[np.float32], query: int, key: int, size: int, scale: ColourScale, aspect: str = "equal"
) -> Any:
    """Draw cells of size × size entries, the first of which begins at a query and a key; NaN stays blank."""
    cells: NDArray[np.float32] = np.ma.masked_invalid(values)
    if scale.log:  # a weight may be 0
        cells = np.ma.maximum(cells, scale.low)
    left, top, (rows, columns) = key - 0.5, query - 0.5, cells.shape
    return axes.imshow(
        cells,
        cmap=colour_map(scale),
        norm=norm(scale),
        extent=(left, left + columns * size, top + rows * size, top),
        interpolation="auto",  # cells that are smaller than a dot are averaged, larger ones stay sharp
        aspect=aspect,  # type: ignore[arg-type]
    )


def draw_bar(
    page: Page, left: float, top: float, height: float, image: Any, scale: ColourScale, name: str = ""
) -> None:
    """Draw a colour bar that covers the values of a scale, with absolute tick labels; an arrow means further values."""
    axes = page.put(left, top, BAR * page.scale, height, COLOUR_BAR)
    bar = page.figure.colorbar(image, cax=axes, extend=scale.extend)
    bar.outline.set_linewidth(0.6 * page.scale)
    low, high = scale.low, scale.high
    if not scale.log:
        ticks = linear_ticks(low, high)
        bar.set_ticks(ticks, labels=tick_words(ticks))
    bar.ax.set_ylim(low if low < high else high - 0.01 * FLAT_RANGE, high)  # a single value has a single colour
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=TICK * page.scale)
    bar.set_label(name, fontsize=NAME * page.scale, labelpad=2 * page.scale)


def bar_ticks(figure: Figure) -> list[list[float]]:
    """The ticks of each colour bar, read from the drawn figure."""
    shown = []
    for axes in figure.axes:
        if axes.get_label() == COLOUR_BAR:
            low, high = sorted(axes.get_ylim())
            margin = 1e-6 * (high - low)
            shown.append([float(tick) for tick in axes.get_yticks() if low - margin <= tick <= high + margin])
    return shown


def bar_room(scales: Sequence[ColourScale], scale: float) -> float:
    """Inches that a colour bar needs, with its widest tick label."""
    if scales[0].log:
        return max(LEAST_BESIDE, 0.25 + LOG_LABEL) * scale
    texts = [text for values in scales for text in tick_words(linear_ticks(values.low, values.high))]
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


def draw_sheet(maps: Sequence[Map], look: Look) -> Figure:
    """Draw a contact sheet: one row per layer, one column per head.

    The range of each panel is written below it; panels that share one colour scale have a colour bar instead.
    """
    heads, shared, scale = look.chosen(maps[0].heads), look.shared, look.scale
    scales = head_scales(maps, heads, shared)
    names, title = 0.25 * scale, 0.2 * scale
    beside = bar_room(scales[0], scale) + BAR_NAME * scale if shared else 0.0
    side = (look.width - names - beside) / max(len(heads), 4)
    roomy = side > 0.4
    head_size = sheet_title_size(side, scale)
    ranges = [[_range_words(layer_map, head) for head in heads] for layer_map in maps]
    widest = max(text_width(line, 1.0) for row in ranges for words in row for line in words.split("\n"))
    small = min(TICK, 0.9 * side / widest)  # so that no label reaches into the next column
    below = 0.03 if shared else small * 2 * 1.3 / 72 + 0.03
    margins = {"left": names, "above": title, "right": beside, "below": 0.2 * scale}
    page = Grid(look, len(maps) * len(heads), side, side + below, len(heads), **margins)
    for row, layer_map in enumerate(maps):
        for column, head in enumerate(heads):
            axes = page.put(*page.place(row * len(heads) + column), 0.93 * side, 0.93 * side)
            image = draw_map(axes, layer_map, head, scales[row][column])
            axes.set(xticks=[], yticks=[])
            if not shared:
                axes.set_xlabel(ranges[row][column], fontsize=small, labelpad=1, linespacing=1.1)
            if row == 0:
                axes.set_title(f"{'Head ' * roomy}{head + 1}", fontsize=head_size, pad=2)
            if column == 0:
                axes.set_ylabel(f"{'Layer ' * roomy}{layer_map.layer}", fontsize=head_size, labelpad=2)
    page.add_note(f"{DOWN} (down), {ACROSS} (across)", page.high - 0.17 * scale)
    if shared:
        left, high = names + side * len(heads) + 0.05, min(len(maps) * side, 3 * scale)
        draw_bar(page, left, title, high, image, scales[0][0], BAR_NAMES[maps[0].show])
    return page.figure


def sheet_title_size(side: float, scale: float) -> float:
    """Points of the names of heads and layers on a contact sheet whose panels are `side` inches wide."""
    return min(TITLE * scale, max(5.0, 8 * side + 2))


def _range_words(layer_map: Map, head: int) -> str:
    """The smallest and the largest value of a head on two lines, or a note if its bias is exactly 0."""
    low, high = layer_map.range(head)
    return ZERO.replace("bias ", "") if head_note(layer_map, head) == ZERO else f"{_short(low)}\n{_short(high)}"


def _short(value: float) -> str:
    """Three significant digits, or all those before the decimal point, with a typographic minus; never −0."""
    text = f"{value:.0f}" if 1000 <= abs(value) < 1e5 else f"{value + 0.0:.3g}"
    return text.replace("-", "−")


def name_offsets(figure: Figure, side: int) -> None:
    """Name the axes of all panels by offsets in place of positions."""
    most = (side - 1) // 2
    step = max(1, round(most / 3))
    shown = [offset for offset in range(-most, most + 1) if offset % step == 0]
    places, words = [offset + most for offset in shown], [str(offset).replace("-", "−") for offset in shown]
    for axes in figure.axes:
        if axes.get_label() == COLOUR_BAR:
            continue
        axes.set_xticks(places, words)
        axes.set_yticks(places, words)
        if axes.get_xlabel():
            axes.xaxis.label.set_text(OFFSETS_ACROSS)
        if axes.get_ylabel():
            axes.yaxis.label.set_text(OFFSETS_DOWN)
