"""Attention mass by distance: a panel per head of one layer, or a contact sheet of all layers coloured by class."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from relpos.maps.diagonals import bin_centres, bin_means, distance_edges
from relpos.maps.distance_profiles import MassProfile, layer_mass, mean_profile
from relpos.maps.head_classes import KINDS, HeadClass, Kind, class_heads
from relpos.maps.subject import View
from relpos.pictures.draw_options import DrawOptions
from relpos.pictures.map_figures import sheet_title_size
from relpos.pictures.picture import Arrays, Picture, describe_view, layer_arrays
from relpos.pictures.printed_page import (
    COLUMNS,
    NAME,
    TICK,
    TITLE,
    Grid,
    Look,
    distance_axis,
    distance_word,
    text_width,
)

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
FAR_END = (  # said where a head is flat
    "A flat head falls at the far end too: it gives each of its n keys 1 / n, and only the last queries have keys that "
    "far."
)
FITTED, BAR, NOTE = "#666666", "#999999", "#444444"  # the fitted curve, the share of the sink, text in a panel


def mass_picture(view: View, look: Look, options: DrawOptions) -> Picture:
    """Draw the attention mass by distance: panels of one layer, or a contact sheet of several."""
    windows: list[list[MassProfile]] = []
    for layers in view.windows():
        windows.append([layer_mass(layer) for layer in layers])
        options.progress(len(windows) / (len(view.more) + 2))
    profiles = [mean_profile(list(of_layer)) for of_layer in zip(*windows, strict=True)]
    classes = class_heads(profiles)
    options.progress(1.0)
    first = profiles[0]
    counts = _count_kinds(itertools.chain(*classes))
    equal = "of equal tokens " if view.kind == "encoding" and not view.layers[0].reads_scores else ""
    caption = (
        f"{options.title}{view.heading}: attention mass by distance {equal}{mean_ending(view)} The sink is the "
        f"share of the first token{' and of learned sinks' if first.learned_sinks else ''}, which the profiles leave "
        "out. "
    )
    if first.causal and any(head.kind == "flat" for heads in classes for head in heads):
        caption += f"{FAR_END} "
    if len(profiles) > 1:
        caption += f"Classes of heads: {', '.join(f'{n} {kind}' for kind, n in counts.items())}."
        figure = draw_mass_sheet(profiles, classes, replace(look, caption=caption))
    else:
        caption += "Dashed: the best of four curves."
        figure = draw_mass(first, classes[0], replace(look, caption=caption))
    edges = distance_edges(first.length, True, first.causal)
    layer_numbers, arrays = [], Arrays()
    for profile, heads in zip(profiles, classes, strict=True):
        means = binned(profile.by_distance, edges, profile.distances)
        entries = [head.as_json() | {"mass_per_distance": means[head.head - 1]} for head in heads]
        layer_numbers.append({"layer": profile.layer, "heads": entries})
        values = {
            "distances": profile.distances,
            "mass": profile.by_distance,
            "first_key": profile.first_key,
            "sink": profile.sink,
            "fitted_mass": np.stack([head.fitted_mass.numpy() for head in heads]),
        }
        arrays |= layer_arrays(profile.layer, values)
    numbers = {
        **describe_view(view, "mass", view.causal, view.length, options.seed, windows=len(windows)),
        "classes": counts,
        "distances": distance_ranges(edges),
        "layers": layer_numbers,
    }
    return Picture(figure, [], caption, numbers, arrays, profiles, classes)


def mean_ending(view: View) -> str:
    """The end of the first sentence of the caption of a mean over windows of text."""
    ending = view.mean_ending or view.ending
    return ending if ending.endswith(".") else f"{ending}."


def distance_ranges(edges: NDArray[np.int64]) -> list[list[int]]:
    """The first and last distance of each bin."""
    return [[int(first), int(end) - 1] for first, end in itertools.pairwise(edges)]


def binned(values: Any, edges: NDArray[np.int64], distances: Any) -> list[list[float | None]]:
    """Means (heads, bins) of a tensor (heads, distances), as nested lists; None where a bin has no value."""
    means = bin_means(values.numpy(), edges, int(distances[0]))
    return [[float(x) if np.isfinite(x) else None for x in head] for head in means]


def _count_kinds(heads: Iterable[HeadClass]) -> dict[Kind, int]:
    """The number of heads of each class, without the classes that have none."""
    kinds = [head.kind for head in heads]
    return {kind: kinds.count(kind) for kind in KINDS if kind in kinds}


def draw_mass(profile: MassProfile, classes: Sequence[HeadClass], look: Look) -> Figure:
    """Draw the mass by distance of one layer, one panel per head, with the fitted curve and the class."""
    heads, scale = look.chosen(profile.heads), look.scale
    names, title, margin = 0.42 * scale, 0.2 * scale, 0.17 * scale
    across = (look.width - margin) / max(min(COLUMNS, len(heads)), 2)
    wide, high = across - names - 0.14 * scale, 0.62 * across
    page = Grid(look, len(heads), across, title + high + 0.22 * scale, left=margin, below=margin)
    low = _lowest([profile], [heads])
    for number, head in enumerate(heads):
        left, top = page.place(number)
        axes = page.put(left + names, top + title, wide, high)
        _draw_profile(axes, profile, classes[head], look.log, low, 1.1 * scale)
        distance_axis(axes, profile.length, profile.causal, look.log, scale, wide)
        axes.set_ylim(low, 1)
        page.name_outer_axes(axes, number, "share of attention", distance_word(profile.causal))
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


def draw_mass_sheet(profiles: Sequence[MassProfile], classes: Sequence[Sequence[HeadClass]], look: Look) -> Figure:
    """Draw a contact sheet: one row per layer, one column per head, small profiles in the colour of the head's class.

    Both axes are logarithmic, and the same in all panels. A bar on the left of each panel is the share of the sink.
    """
    heads = [[head for head in look.chosen(profile.heads) if head < profile.heads] for profile in profiles]
    scale, columns = look.scale, max(map(len, heads))
    names, title, legend = 0.28 * scale, 0.2 * scale, 0.2 * scale
    side = (look.width - names) / max(4, columns)
    high = 0.55 * side
    margins = {"left": names, "above": legend + title, "below": 0.2 * scale}
    page = Grid(look, columns * len(profiles), side, high + 0.04, columns, **margins)
    size = sheet_title_size(side, scale)
    low = _lowest(profiles, heads)
    for row, (profile, chosen) in enumerate(zip(profiles, heads, strict=True)):
        for column, head in enumerate(chosen):
            axes = page.put(*page.place(row * columns + column), 0.95 * side, high)
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
    counts = _count_kinds(classes[row][head] for row, chosen in enumerate(heads) for head in chosen)
    page.add_legend(
        {f"{kind} ({count})": {"color": COLOURS[kind], "linewidth": 2.2 * scale} for kind, count in counts.items()},
        ncols=len(counts),
        fontsize=NAME * scale,
        handlelength=1.4,
        columnspacing=1.4,
    )
    far = f"{profiles[0].length - 1:,}"
    words = (
        f"up: share of attention, {_power(low)} to 1; across: distance, {'0' if profiles[0].causal else f'−{far}'} to "
        f"{far}; both logarithmic. Grey bar: the sink's share, 0 to 1"
    )
    page.figure.text(0.02 / page.width, page.height_at(legend + title - 0.03), "Layer", size=0.85 * size)
    page.add_note(words, page.high - 0.17 * scale)
    return page.figure


def _power(value: float) -> str:
    """A power of ten, as 10⁻⁶."""
    digits = str(round(math.log10(value))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{digits}"


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
