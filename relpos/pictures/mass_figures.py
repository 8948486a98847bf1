"""Attention mass by distance: a panel per head of one layer, or a contact sheet of all layers coloured by class."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from relpos.maps.bins import bin_centres, bin_means, distance_edges
from relpos.maps.heads.head_classes import KINDS, HeadClass, Kind
from relpos.maps.heads.mass_profiles import MassProfile
from relpos.pictures.figures import WIDTHS
from relpos.pictures.printed_page import NAME, TICK, TITLE, Page, text_scale, text_width
from relpos.pictures.profiles import label_distances

COLUMNS = 3  # panels beside each other
LEAST = 1e-6  # the lowest mass that is drawn
# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS: dict[Kind, str] = {
    "previous token": "#D55E00",
    "next token": "#E69F00",
    "decaying": "#0072B2",
    "flat": "#009E73",
    "periodic": "#CC79A7",
    "sink": "#000000",
    "other": "#56B4E9",
}
FITTED, BAR, NOTE = "#666666", "#999999", "#444444"  # the fitted curve, the share of the sink, text in a panel


def draw_mass(
    profile: MassProfile,
    classes: Sequence[HeadClass],
    chosen: Sequence[int] | None = None,
    caption: str = "",
    width: float = WIDTHS[2],
    log: bool = False,
    banner: str = "",
) -> Figure:
    """Draw the mass by distance of one layer, one panel per head, with the fitted curve and the class.

    Args:
        profile: The mass.
        classes: The class of each head.
        chosen: Heads to draw; 0 is the first. All by default.
        caption: Text below the panels.
        width: Width of the page in inches.
        log: Whether the distance axis is logarithmic too.
        banner: Text above the panels.

    Returns:
        The figure.
    """
    heads = list(range(profile.heads)) if chosen is None else list(chosen)
    columns = min(COLUMNS, len(heads))
    scale = text_scale(width)
    names, title, axis_label = 0.42 * scale, 0.2 * scale, 0.17 * scale
    across = (width - axis_label) / max(columns, 2)
    wide, high = across - names - 0.14 * scale, 0.62 * across
    down = title + high + 0.22 * scale
    rows = math.ceil(len(heads) / columns)
    page = Page(axis_label + across * columns, down * rows + axis_label, scale, caption, banner)
    low = _lowest([profile], [heads])
    for place, head in enumerate(heads):
        left, top = axis_label + place % columns * across + names, place // columns * down + title
        axes = page.put(left, top, wide, high)
        _draw_profile(axes, profile, classes[head], log, low, 1.1 * scale)
        label_distances(axes, profile.length, profile.causal, log, scale, wide)
        axes.set_ylim(low, 1)
        if place + columns < len(heads):
            axes.set_xlabel("")
        if place % columns == 0:
            axes.set_ylabel("share of attention", fontsize=NAME * scale, labelpad=2 * scale)
        words = f"Head {head + 1}: {classes[head].kind}, sink {100 * classes[head].sink:.0f} %"
        axes.set_title(words, fontsize=min((TITLE - 1) * scale, across / text_width(words, 1.0)), pad=3 * scale)
        note: Any = {"size": TICK * scale, "transform": axes.transAxes, "color": NOTE, "linespacing": 1.3}
        if profile.causal:
            axes.text(0.97, 0.95, _curve_words(classes[head]), ha="right", va="top", **note)
        else:
            behind = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1}  # the curves cross it here
            axes.text(0.5, 0.05, _curve_words(classes[head]), ha="center", va="bottom", bbox=behind, **note)
    return page.figure


def _curve_words(head: HeadClass) -> str:
    """The fitted curve and the half-distance of a head, on two lines."""
    if head.period is not None:
        curve = f"period {head.period:.3g}"
    else:
        name, value = list(head.parameters.items())[-1]
        curve = head.curve if head.curve == "constant" else f"{head.curve}, {name} = {value:.2g}".replace("-", "−")
    return curve if head.half_distance is None else f"{curve}\nhalf within {head.half_distance:,}"


def draw_mass_sheet(
    profiles: Sequence[MassProfile],
    classes: Sequence[Sequence[HeadClass]],
    chosen: Sequence[int] | None = None,
    caption: str = "",
    width: float = WIDTHS[2],
    banner: str = "",
) -> Figure:
    """Draw a contact sheet: one row per layer, one column per head, small profiles in the colour of the head's class.

    Both axes are logarithmic, and the same in all panels. A bar on the left of each panel is the share of the sink.

    Args:
        profiles: The mass, one per layer.
        classes: The classes of the heads, one list per layer.
        chosen: Heads to draw; 0 is the first. All by default.
        caption: Text below the panels.
        width: Width of the page in inches.
        banner: Text above the panels.

    Returns:
        The figure.
    """
    heads = [[h for h in chosen or range(p.heads) if h < p.heads] for p in profiles]
    scale = text_scale(width)
    names, title = 0.28 * scale, 0.2 * scale
    side = (width - names) / max(4, *(len(row) for row in heads))
    high = 0.55 * side
    legend = 0.2 * scale
    total = legend + title + (high + 0.04) * len(profiles) + 0.2 * scale
    page = Page(names + side * max(map(len, heads)), total, scale, caption, banner)
    size = min(TITLE * scale, max(5.0, 8 * side + 2))
    low = _lowest(profiles, heads)
    for row, (profile, its_heads) in enumerate(zip(profiles, heads, strict=True)):
        for column, head in enumerate(its_heads):
            top = legend + title + row * (high + 0.04)
            axes = page.put(names + column * side, top, 0.95 * side, high)
            _draw_profile(axes, profile, classes[row][head], True, low, 0.8 * scale, fitted=False)
            axes.set_xscale("symlog", linthresh=1, linscale=0.3)
            axes.set(xlim=(-0.1 if profile.causal else 1 - profile.length, profile.length - 1), ylim=(low, 1))
            axes.set(xticks=[], yticks=[])
            axes.minorticks_off()
            share = classes[row][head].sink
            axes.add_patch(Rectangle((0, 0), 0.06, share, transform=axes.transAxes, color=BAR, linewidth=0))
            if row == 0:
                axes.set_title(f"{'Head ' * (side > 0.5)}{head + 1}", fontsize=size, pad=2)
            if column == 0:
                axes.set_ylabel(str(profile.layer), fontsize=size, labelpad=4, rotation=0, ha="right", va="center")
    _draw_legend(page, [head for row, its in enumerate(heads) for head in (classes[row][h] for h in its)], scale)
    far = f"{profiles[0].length - 1:,}"
    words = (
        f"up: share of attention, {_power(low)} to 1; across: distance, {'0' if profiles[0].causal else f'−{far}'} to "
        f"{far}; both logarithmic. Grey bar: the sink's share, 0 to 1"
    )
    page.figure.text(0.02 / page.width, 1 - (page.top + legend + title - 0.03) / page.height, "Layer", size=0.85 * size)
    place = 1 - (page.top + total - 0.17 * scale) / page.height
    page.figure.text(0.5, place, words, size=TICK * scale, ha="center", va="top")
    return page.figure


def _power(value: float) -> str:
    """A power of ten, as 10⁻⁶."""
    digits = str(round(math.log10(value))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{digits}"


def _draw_legend(page: Page, classes: Sequence[HeadClass], scale: float) -> None:
    counts = {kind: sum(head.kind == kind for head in classes) for kind in KINDS}
    shown = {kind: count for kind, count in counts.items() if count}
    page.figure.legend(
        [Line2D([], [], color=COLOURS[kind], linewidth=2.2 * scale) for kind in shown],
        [f"{kind} ({count})" for kind, count in shown.items()],
        loc="upper center",
        bbox_to_anchor=(0.5, 1 - page.top / page.height),
        ncols=len(shown),
        frameon=False,
        fontsize=NAME * scale,
        handlelength=1.4,
        columnspacing=1.4,
        borderaxespad=0.0,
    )


def _draw_profile(
    axes: Axes, profile: MassProfile, head: HeadClass, log: bool, low: float, line: float, fitted: bool = True
) -> None:
    edges = distance_edges(profile.length, log, profile.causal)
    centres = bin_centres(edges, log)
    lowest = int(profile.distances[0])
    mass = bin_means(profile.by_distance[head.head - 1].numpy(), edges, lowest)
    axes.set_yscale("log")
    drawn = np.maximum(mass, low / 10)
    axes.fill_between(centres, low / 10, drawn, color=COLOURS[head.kind], alpha=0.18, linewidth=0)
    axes.plot(centres, drawn, color=COLOURS[head.kind], linewidth=line)
    if fitted:
        curve = head.fitted_mass.numpy()
        both = curve if profile.causal else np.concatenate([curve[:0:-1] / 2, curve[:1], curve[1:] / 2])
        expected = np.maximum(bin_means(both, edges, lowest), low / 10)
        axes.plot(centres, expected, color=FITTED, linewidth=0.8 * line, linestyle=(0, (3, 2)))
    axes.minorticks_off()


def _lowest(profiles: Sequence[MassProfile], heads: Sequence[Sequence[int]]) -> float:
    """The lower end of the mass axis: a power of ten below nearly all that is drawn, `LEAST` at least."""
    values = np.concatenate([p.by_distance[list(h)].numpy().ravel() for p, h in zip(profiles, heads, strict=True)])
    values = values[values > 0]
    if len(values) == 0:
        return LEAST
    return float(max(LEAST, 10.0 ** math.floor(math.log10(float(np.quantile(values, 0.02))))))
