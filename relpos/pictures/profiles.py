"""Profiles: value against distance, one line per head, for the layers of a model or for several encodings."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from relpos.maps.map import Map
from relpos.pictures.colours import linear_ticks, tick_words
from relpos.pictures.figures import WIDTHS
from relpos.pictures.printed_page import NAME, TICK, TITLE, Page, position_ticks, text_scale, text_width

COLUMNS = 3  # panels beside each other
# Okabe and Ito's colours, which the colour-blind can tell apart, without the two that are too light for a line.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
STYLES: tuple[Any, ...] = ("-", "--", ":", "-.")
LEGEND_LINE = 0.34  # inches of line beside a name in the legend


def draw_profiles(
    maps: Sequence[Map],
    chosen: Sequence[int] | None = None,
    caption: str = "",
    width: float = WIDTHS[2],
    log: bool = False,
    banner: str = "",
) -> Figure:
    """Draw value against distance, one line per head and one panel per layer.

    Where a diagonal has several values the line is their mean, and a band extends from the smallest to the largest. In
    both directions, negative distances are those to keys after the query.

    Args:
        maps: One map per layer.
        chosen: Heads to draw; 0 is the first. All by default.
        caption: Text below the panels.
        width: Width of the page in inches.
        log: Whether the distance axis is logarithmic from 1 on, and from −1 on in both directions.
        banner: Text above the panels.

    Returns:
        The figure.
    """
    heads = list(range(maps[0].heads)) if chosen is None else list(chosen)
    styles = {head: _style(place) for place, head in enumerate(heads)}
    legend = {f"Head {head + 1}": style for head, style in styles.items()}
    panels = {f"Layer {layer_map.layer}" if len(maps) > 1 else "": [(layer_map, styles)] for layer_map in maps}
    return _draw(panels, legend, caption, width, log, banner)


def draw_together(
    maps: Mapping[str, Map],
    chosen: Sequence[int] | None = None,
    caption: str = "",
    width: float = WIDTHS[2],
    log: bool = False,
    banner: str = "",
) -> Figure:
    """Draw the profiles of several encodings in one panel, one colour per encoding.

    Up to four heads have a line style each; more heads share the solid line.

    Args:
        maps: One map per name in the legend.
        chosen: Heads to draw; 0 is the first. All by default.
        caption: Text below the panel.
        width: Width of the page in inches.
        log: Whether the distance axis is logarithmic.
        banner: Text above the panel.

    Returns:
        The figure.
    """
    drawn: list[tuple[Map, Styles]] = []
    legend: dict[str, tuple[str, Any]] = {}
    for place, (name, layer_map) in enumerate(maps.items()):
        heads = list(range(layer_map.heads)) if chosen is None else list(chosen)
        few = 1 < len(heads) <= len(STYLES)
        colour = PALETTE[place % len(PALETTE)]
        drawn.append((layer_map, {head: (colour, STYLES[order if few else 0]) for order, head in enumerate(heads)}))
        legend[name] = (colour, "-")
        if few and place == len(maps) - 1:
            legend |= {f"Head {head + 1}": ("#666666", STYLES[order]) for order, head in enumerate(heads)}
    return _draw({"": drawn}, legend, caption, width, log, banner)


Styles = Mapping[int, tuple[str, Any]]  # by head (0 is the first): colour and style of its line


def _draw(
    panels: Mapping[str, Sequence[tuple[Map, Styles]]],
    legend: Mapping[str, tuple[str, Any]],
    caption: str,
    width: float,
    log: bool,
    banner: str,
) -> Figure:
    columns = min(COLUMNS, len(panels))
    scale = text_scale(width)
    ticks = {title: linear_ticks(*_limits(drawn)) for title, drawn in panels.items()}
    numbers = max(text_width(word, TICK * scale) for values in ticks.values() for word in tick_words(values))
    names, title_room = numbers + 0.25 * scale, 0.22 * scale
    beside = LEGEND_LINE * scale + max(text_width(name, TICK * scale) for name in legend) + 0.1 * scale
    across = (width - beside) / max(columns, 1.6)  # a single panel takes more than half a page
    high = 0.68 * across
    down = title_room + high + 0.42 * scale
    least = (0.14 * len(legend) + 0.2) * scale + title_room  # height of the legend
    page = Page(across * columns + beside, max(down * math.ceil(len(panels) / columns), least), scale, caption, banner)
    for place, (title, drawn) in enumerate(panels.items()):
        wide = across - names - 0.1 * scale
        axes = page.put(place % columns * across + names, place // columns * down + title_room, wide, high)
        for layer_map, styles in drawn:
            _draw_lines(axes, layer_map, styles, scale)
        axes.set_ylim(*_limits(drawn))
        axes.set_yticks(ticks[title], tick_words(ticks[title]))
        longest = max(layer_map.length for layer_map, _ in drawn)
        label_distances(axes, longest, all(layer_map.causal for layer_map, _ in drawn), log, scale, wide)
        axes.set_ylabel(drawn[0][0].show, fontsize=NAME * scale, labelpad=2 * scale)
        axes.set_title(title, fontsize=TITLE * scale, pad=3 * scale)
    page.figure.legend(
        [Line2D([], [], color=colour, linestyle=style, linewidth=1.2 * scale) for colour, style in legend.values()],
        list(legend),
        loc="upper right",
        bbox_to_anchor=(1, 1 - (page.top + title_room) / page.height),
        frameon=False,
        fontsize=TICK * scale,
        handlelength=2.6,
        borderaxespad=0.2,
    )
    return page.figure


def _draw_lines(axes: Axes, layer_map: Map, styles: Styles, scale: float) -> None:
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


def label_distances(axes: Axes, length: int, causal: bool, log: bool, scale: float, wide: float) -> None:
    """Set label, scale and ticks of a distance axis that is `wide` inches long."""
    name = "distance" if causal else "distance (query − key)"
    axes.set_xlabel(name, fontsize=NAME * scale, labelpad=1 * scale)
    if log and length > 1:
        axes.set_xscale("symlog", linthresh=1, linscale=0.3)  # symlog, so that 0 has a place too
        powers = range(int(math.log10(length - 1)) + 1)
        if not causal and length > 10:  # there is room for half as many labels, and none between 0 and ±10
            powers = powers[1 :: 1 if length <= 1000 else 2]
        ticks = [0, *(10**power for power in powers)]
        words = [f"{tick:,}" for tick in ticks]
        axes.set_xlim(-0.1 if causal else 1 - length, length - 1)
    else:
        ticks, words = position_ticks(length, wide if causal else 0.45 * wide, scale)
        axes.margins(x=0.01)
    if not causal:
        ticks = [*(-tick for tick in reversed(ticks[1:])), *ticks]
        words = [*(f"−{word}" for word in reversed(words[1:])), *words]
    axes.set_xticks(ticks, words)
    if log and length > 1:
        axes.xaxis.minorticks_off()


def _style(place: int) -> tuple[str, Any]:
    """Colour and style of a line: different for each of the first 24."""
    return PALETTE[place % len(PALETTE)], STYLES[place // len(PALETTE) % len(STYLES)]
