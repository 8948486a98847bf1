"""Profiles: the value of every head against the distance between query and key."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from relpos.maps.map import Map
from relpos.pictures.colours import linear_ticks, tick_words
from relpos.pictures.printed_page import (
    COLUMNS,
    TICK,
    TITLE,
    Grid,
    Look,
    distance_axis,
    distance_word,
    text_width,
)

# Okabe and Ito's colours, which the colour-blind can tell apart, without the two that are too light for a line.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
STYLES: tuple[Any, ...] = ("-", "--", ":", "-.")
LEGEND_LINE = 0.34  # inches of line beside a name in the legend
MOST_LINES = 4  # heads in one panel; more have a panel each

Styles = Mapping[int, tuple[str, Any]]  # by head (0 is the first): colour and style of its line


def draw_profiles(maps: Sequence[Map], look: Look) -> Figure:
    """Draw value against distance: one panel per head, or per layer; a few heads of one layer share a panel.

    Where a diagonal has several values the line is their mean, and a band extends from the smallest to the largest. In
    both directions, negative distances are those to keys after the query.
    """
    heads = look.chosen(maps[0].heads)
    if len(maps) == 1 and len(heads) > MOST_LINES:
        return _draw_lines({f"Head {head + 1}": [(maps[0], {head: (PALETTE[0], "-")})] for head in heads}, {}, look)
    styles = {
        head: (PALETTE[number % len(PALETTE)], STYLES[number // len(PALETTE) % len(STYLES)])
        for number, head in enumerate(heads)
    }
    legend = {f"Head {head + 1}": style for head, style in styles.items()}
    panels = {f"Layer {layer_map.layer}" if len(maps) > 1 else "": [(layer_map, styles)] for layer_map in maps}
    return _draw_lines(panels, legend, look)


def draw_together(maps: Mapping[str, Map], heads: Sequence[Sequence[int]], look: Look) -> Figure:
    """Draw the profiles of some heads of several encodings: one panel per head, one colour per name in the legend."""
    legend = {
        name: (PALETTE[number % len(PALETTE)], STYLES[number // len(PALETTE) % len(STYLES)])
        for number, name in enumerate(maps)
    }
    panels: dict[str, list[tuple[Map, Styles]]] = {}
    for order in range(max(map(len, heads))):
        numbers = [chosen[order] for chosen in heads if order < len(chosen)]
        title = (
            f"Head {numbers[0] + 1}" if len(set(numbers)) == 1 else f"Heads {', '.join(str(n + 1) for n in numbers)}"
        )
        panels[title] = [
            (layer_map, {chosen[order]: legend[name]})
            for (name, layer_map), chosen in zip(maps.items(), heads, strict=True)
            if order < len(chosen)
        ]
    return _draw_lines(panels, legend, look)


def _draw_lines(
    panels: Mapping[str, Sequence[tuple[Map, Styles]]], legend: Mapping[str, tuple[str, Any]], look: Look
) -> Figure:
    scale = look.scale
    ticks = {title: linear_ticks(*_limits(drawn), most=9 if len(panels) == 1 else 6) for title, drawn in panels.items()}
    numbers = max(text_width(word, TICK * scale) for values in ticks.values() for word in tick_words(values))
    names, title_room = numbers + 0.25 * scale, 0.22 * scale
    beside = 0.05 * scale
    if legend:
        beside += LEGEND_LINE * scale + max(text_width(name, TICK * scale) for name in legend) + 0.05 * scale
    across = (look.width - beside) / max(min(COLUMNS, len(panels)), 1.6)  # a single panel takes more than half a page
    wide, high = across - names - 0.1 * scale, 0.68 * across
    least = (0.14 * len(legend) + 0.2) * scale + title_room  # height of the legend
    below = 0.25 * scale  # the name of the axis of distances
    page = Grid(look, len(panels), across, title_room + high + 0.2 * scale, right=beside, below=below, least=least)
    for number, (title, drawn) in enumerate(panels.items()):
        left, top = page.place(number)
        axes = page.put(left + names, top + title_room, wide, high)
        for layer_map, styles in drawn:
            _draw_heads_lines(axes, layer_map, styles, scale)
        axes.set_ylim(*_limits(drawn))
        axes.set_yticks(ticks[title], tick_words(ticks[title]))
        causal = all(layer_map.causal for layer_map, _ in drawn)
        distance_axis(axes, max(layer_map.length for layer_map, _ in drawn), causal, look.log, scale, wide)
        page.name_outer_axes(axes, number, drawn[0][0].show, distance_word(causal))
        axes.set_title(title, fontsize=TITLE * scale, pad=3 * scale)
    if legend:
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
