"""Profiles: value against distance, one line per head, of the layers of a model or of several encodings."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from relpos.view.colours import linear_ticks, tick_words
from relpos.view.figures import NAME, TICK, TITLE, WIDTHS, Page, position_ticks, text_scale, text_width
from relpos.view.maps import Map

COLUMNS = 3  # of panels
# Okabe and Ito's colours, which the colour-blind tell apart, without the two that are too light for a line.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
STYLES: tuple[Any, ...] = ("-", "--", ":", "-.")
LEGEND_LINE = 0.34  # inches of line beside a name


def draw_profiles(
    maps: Sequence[Map],
    chosen: Sequence[int] | None = None,
    caption: str = "",
    width: float = WIDTHS[2],
    log: bool = False,
    banner: str = "",
) -> Figure:
    """Value against distance, one line per head and one panel per layer.

    Where a diagonal has several values the line is their mean, and a band goes from the smallest to the largest.

    Args:
        maps: One per layer.
        chosen: Heads to draw, 0 is the first; all unless given.
        caption: Printed below.
        width: Of the page, in inches.
        log: A logarithmic distance axis, from 1 on.
        banner: Printed above.

    Returns:
        The page.
    """
    heads = list(range(maps[0].heads)) if chosen is None else list(chosen)
    styles = {head: _style(place) for place, head in enumerate(heads)}
    legend = {f"Head {head + 1}": style for head, style in styles.items()}
    panels = {f"Layer {found.layer}" if len(maps) > 1 else "": [(found, styles)] for found in maps}
    return _draw(panels, legend, caption, width, log, banner)


def draw_together(
    maps: Mapping[str, Map],
    chosen: Sequence[int] | None = None,
    caption: str = "",
    width: float = WIDTHS[2],
    log: bool = False,
    banner: str = "",
) -> Figure:
    """The same of several encodings in one panel: one colour per encoding; a few heads have a line style each."""
    drawn: list[tuple[Map, Styles]] = []
    legend: dict[str, tuple[str, Any]] = {}
    for place, (name, found) in enumerate(maps.items()):
        heads = list(range(found.heads)) if chosen is None else list(chosen)
        few = 1 < len(heads) <= len(STYLES)
        colour = PALETTE[place % len(PALETTE)]
        drawn.append((found, {head: (colour, STYLES[order if few else 0]) for order, head in enumerate(heads)}))
        legend[name] = (colour, "-")
        if few and place == len(maps) - 1:
            legend |= {f"Head {head + 1}": ("#666666", STYLES[order]) for order, head in enumerate(heads)}
    return _draw({"": drawn}, legend, caption, width, log, banner)


Styles = Mapping[int, tuple[str, Any]]  # head (0 is the first): colour and style of its line


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
    across = (width - beside) / max(columns, 1.6)  # one panel alone takes more than half a page
    high = 0.68 * across
    down = title_room + high + 0.42 * scale
    least = (0.14 * len(legend) + 0.2) * scale + title_room  # of the legend
    page = Page(across * columns + beside, max(down * math.ceil(len(panels) / columns), least), scale, caption, banner)
    for place, (title, drawn) in enumerate(panels.items()):
        wide = across - names - 0.1 * scale
        axes = page.put(place % columns * across + names, place // columns * down + title_room, wide, high)
        for found, styles in drawn:
            _draw_lines(axes, found, styles, scale)
        axes.set_ylim(*_limits(drawn))
        axes.set_yticks(ticks[title], tick_words(ticks[title]))
        _name_distances(axes, max(found.length for found, _ in drawn), log, scale, wide)
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


def _draw_lines(axes: Axes, found: Map, styles: Styles, scale: float) -> None:
    distance = np.arange(found.length)
    shade = 0.12 if len(styles) <= len(STYLES) else 0.05  # many bands over each other must not hide the lines
    for head, (colour, style) in styles.items():
        lowest, mean, highest = found.profile[:, head]
        if (lowest < highest).any():
            axes.fill_between(distance, lowest, highest, color=colour, alpha=shade, linewidth=0)
        axes.plot(distance, mean, color=colour, linestyle=style, linewidth=1.1 * scale, label=f"Head {head + 1}")


def _limits(drawn: Sequence[tuple[Map, Styles]]) -> tuple[float, float]:
    """The ends of a panel's value axis: a little beyond all that is drawn."""
    shown: list[Any] = [found.profile[:, head] for found, styles in drawn for head in styles]
    low, high = min(float(np.nanmin(one)) for one in shown), max(float(np.nanmax(one)) for one in shown)
    margin = 0.04 * (high - low) or max(0.1 * abs(high), 0.1)
    return low - margin, high + margin


def _name_distances(axes: Axes, length: int, log: bool, scale: float, wide: float) -> None:
    axes.set_xlabel("distance", fontsize=NAME * scale, labelpad=1 * scale)
    if log and length > 1:
        axes.set_xscale("symlog", linthresh=1, linscale=0.3)  # 0 has a place too
        ticks = [0, *(10**power for power in range(int(math.log10(length - 1)) + 1))]
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.xaxis.minorticks_off()
        axes.set_xlim(-0.1, length - 1)
        return
    axes.set_xticks(*position_ticks(length, wide, scale))
    axes.margins(x=0.01)


def _style(place: int) -> tuple[str, Any]:
    """Colour and style of a line: no two of the first 24 have the same."""
    return PALETTE[place % len(PALETTE)], STYLES[place // len(PALETTE) % len(STYLES)]
