"""Figures of maps: heat maps of the heads of a layer, a contact sheet of several layers, and profiles by distance."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from relpos.maps.map import FLAT_RANGE, ColourScale, Map
from relpos.pictures.captions import ZERO, head_note
from relpos.pictures.colours import colour_map, head_scales, linear_ticks, norm, tick_words
from relpos.pictures.printed_page import (
    COLOUR_BAR,
    COLUMNS,
    TICK,
    TITLE,
    Grid,
    Look,
    Page,
    distance_axis,
    distance_word,
    position_ticks,
    position_word,
    text_width,
)

BAR, LABEL = 0.085, 4.5  # width of a colour bar in inches, size of a token label in points
DOWN, ACROSS = "query position", "key position"  # the labels of the axes
OFFSETS_DOWN, OFFSETS_ACROSS = "rows, query − key", "columns, query − key"  # of a bias over offsets of image patches
LEAST_BESIDE = 0.58  # inches beside a panel, for its colour bar and the tick labels
LOG_LABEL = 0.3  # width of a power of ten, in inches
# Okabe and Ito's colours, which the colour-blind can tell apart, without the two that are too light for a line.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
STYLES: tuple[Any, ...] = ("-", "--", ":", "-.")
LEGEND_LINE = 0.34  # inches of line beside a name in the legend

Styles = Mapping[int, tuple[str, Any]]  # by head (0 is the first): colour and style of its line


def draw_maps(maps: Sequence[Map], look: Look) -> Figure:
    """Draw the heads of one layer, or a contact sheet of several."""
    return draw_sheet(maps, look) if len(maps) > 1 else draw_heads(maps[0], look)


def draw_heads(layer_map: Map, look: Look) -> Figure:
    """Draw one panel per head, three beside each other, each with its own colour bar or all with a shared one."""
    heads, labels, shared, scale = look.chosen(layer_map.heads), look.labels, look.shared, look.scale
    scales = head_scales([layer_map], heads, shared)[0]
    margin = 0.17 * scale  # room for the names of the axes
    longest = max((len(label) for label in labels or ()), default=0)
    if labels is None:
        numbers = 0.1 * scale + text_width(position_word(layer_map.length - 1, layer_map.length), TICK * scale)
    else:
        numbers = scale * (0.1 + LABEL / 72 * 0.62 * longest)
    beside, title = bar_room(scales, scale), 0.2 * scale
    space = look.width - margin - beside * shared
    across = space / max(min(COLUMNS, len(heads)), 2 if labels is None else 1)  # a single head takes half a page
    side = across - numbers - (0.1 * scale if shared else beside)
    down = title + side + (numbers if labels else 0.2 * scale)
    page = Grid(look, len(heads), across, down, left=margin, right=beside * shared, below=margin)
    for number, head in enumerate(heads):
        left, top = page.place(number)
        axes = page.put(left + numbers, top + title, side, side)
        image = draw_map(axes, layer_map, head, scales[number])
        _name_positions(axes, layer_map.length, labels, scale, side)
        note = head_note(layer_map, head)
        words = f"Head {head + 1}" + (f": {note}" if note else "")
        axes.set_title(words, pad=3 * scale, fontsize=(TITLE - bool(note)) * scale)
        page.name_outer_axes(axes, number, DOWN, ACROSS)
        if not shared:
            beginning = left + numbers + side + 0.06 * scale
            draw_bar(page, beginning, top + title, side, image, scales[number])
    if shared:
        left = margin + across * page.columns
        draw_bar(page, left, title, min(side, 3 * scale), image, scales[0])
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


def draw_bar(page: Page, left: float, top: float, height: float, image: Any, scale: ColourScale) -> None:
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
    names, title, beside = 0.25 * scale, 0.2 * scale, bar_room(scales[0], scale) if shared else 0.0
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
        draw_bar(page, left, title, high, image, scales[0][0])
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


def draw_profiles(maps: Sequence[Map], look: Look) -> Figure:
    """Draw value against distance, one line per head and one panel per layer.

    Where a diagonal has several values the line is their mean, and a band extends from the smallest to the largest. In
    both directions, negative distances are those to keys after the query.
    """
    styles = {  # different for each of the first 24
        head: (PALETTE[number % len(PALETTE)], STYLES[number // len(PALETTE) % len(STYLES)])
        for number, head in enumerate(look.chosen(maps[0].heads))
    }
    legend = {f"Head {head + 1}": style for head, style in styles.items()}
    panels = {f"Layer {layer_map.layer}" if len(maps) > 1 else "": [(layer_map, styles)] for layer_map in maps}
    return _draw_lines(panels, legend, look)


def draw_together(maps: Mapping[str, Map], look: Look) -> Figure:
    """Draw the profiles of several encodings in one panel, one colour per name in the legend.

    Up to four heads have a line style each; more heads share the solid line.
    """
    drawn: list[tuple[Map, Styles]] = []
    legend: dict[str, tuple[str, Any]] = {}
    for number, (name, layer_map) in enumerate(maps.items()):
        heads = look.chosen(layer_map.heads)
        few = 1 < len(heads) <= len(STYLES)
        colour = PALETTE[number % len(PALETTE)]
        drawn.append((layer_map, {head: (colour, STYLES[order if few else 0]) for order, head in enumerate(heads)}))
        legend[name] = (colour, "-")
        if few and number == len(maps) - 1:
            legend |= {f"Head {head + 1}": ("#666666", STYLES[order]) for order, head in enumerate(heads)}
    return _draw_lines({"": drawn}, legend, look)


def _draw_lines(
    panels: Mapping[str, Sequence[tuple[Map, Styles]]], legend: Mapping[str, tuple[str, Any]], look: Look
) -> Figure:
    scale = look.scale
    ticks = {title: linear_ticks(*_limits(drawn)) for title, drawn in panels.items()}
    numbers = max(text_width(word, TICK * scale) for values in ticks.values() for word in tick_words(values))
    names, title_room = numbers + 0.25 * scale, 0.22 * scale
    beside = LEGEND_LINE * scale + max(text_width(name, TICK * scale) for name in legend) + 0.1 * scale
    across = (look.width - beside) / max(min(COLUMNS, len(panels)), 1.6)  # a single panel takes more than half a page
    wide, high = across - names - 0.1 * scale, 0.68 * across
    least = (0.14 * len(legend) + 0.2) * scale + title_room  # height of the legend
    page = Grid(look, len(panels), across, title_room + high + 0.42 * scale, right=beside, least=least)
    for number, (title, drawn) in enumerate(panels.items()):
        left, top = page.place(number)
        axes = page.put(left + names, top + title_room, wide, high)
        for layer_map, styles in drawn:
            _draw_heads_lines(axes, layer_map, styles, scale)
        axes.set_ylim(*_limits(drawn))
        axes.set_yticks(ticks[title], tick_words(ticks[title]))
        causal = all(layer_map.causal for layer_map, _ in drawn)
        distance_axis(axes, max(layer_map.length for layer_map, _ in drawn), causal, look.log, scale, wide)
        page.name_axes(axes, drawn[0][0].show, distance_word(causal))
        axes.set_title(title, fontsize=TITLE * scale, pad=3 * scale)
    lines = {
        name: {"color": colour, "linestyle": style, "linewidth": 1.2 * scale}
        for name, (colour, style) in legend.items()
    }
    corner = {"loc": "upper right", "bbox_to_anchor": (1, page.height_at(title_room)), "borderaxespad": 0.2}
    page.add_legend(lines, fontsize=TICK * scale, handlelength=2.6, **corner)
    return page.figure


def _draw_heads_lines(axes: Axes, layer_map: Map, styles: Styles, scale: float) -> None:
    distance = layer_map.distances
    shade = 0.12 if len(styles) <= len(STYLES) else 0.05  # many overlapping bands must not hide the lines
    for head, (colour, style) in styles.items():
        lowest, mean, highest = layer_map.profile[:, head]
        if (lowest < highest).any():
            axes.fill_between(distance, lowest, highest, color=colour, alpha=shade, linewidth=0)
        axes.plot(distance, mean, color=colour, linestyle=style, linewidth=1.1 * scale, label=f"Head {head + 1}")


def _limits(drawn: Sequence[tuple[Map, Styles]]) -> tuple[float, float]:
    """The limits of a panel's value axis: slightly beyond all values drawn."""
    lines: list[Any] = [layer_map.profile[:, head] for layer_map, styles in drawn for head in styles]
    low, high = min(float(np.nanmin(line)) for line in lines), max(float(np.nanmax(line)) for line in lines)
    margin = 0.04 * (high - low) or max(0.1 * abs(high), 0.1)
    return low - margin, high + margin
