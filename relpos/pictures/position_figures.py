"""The positional part of rotary heads: mean score by distance, the rotation's kernel, and its terms by frequency."""

from dataclasses import replace

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from relpos.maps.diagonals import bin_centres, bin_means, distance_edges
from relpos.maps.distance_profiles import (
    RotationKernel,
    ScoreProfile,
    layer_scores,
    mean_scores,
    rotation_kernel,
    token_means,
)
from relpos.maps.map import ColourScale
from relpos.maps.subject import View
from relpos.pictures.colours import BOTH_SIGNS, linear_ticks, tick_words
from relpos.pictures.draw_options import DrawOptions
from relpos.pictures.map_figures import draw_bar
from relpos.pictures.mass_figures import binned, distance_ranges, mean_ending
from relpos.pictures.picture import Picture, describe_view, layer_arrays
from relpos.pictures.printed_page import COLUMNS, TICK, TITLE, Grid, Look, Page, distance_axis, distance_word

SCORE, KERNEL = "#0072B2", "#D55E00"  # Okabe and Ito's blue and vermilion
BAND = 0.15  # opacity of the standard deviation
GAP = 0.1  # inches between the two panels of a head


def scores_picture(view: View, look: Look, options: DrawOptions) -> Picture:
    """Draw mean scores by distance, and the rotation's kernel where there is one, of one layer."""
    if len(view.layers) > 1:
        raise ValueError("the scores and the rotation of one layer fill a page: give one layer, not all.")
    profiles, means = [], []
    for (layer,) in view.windows():
        profiles.append(layer_scores(layer))
        if layer.turned is not None:
            means.append(token_means(layer))
        options.progress(len(profiles) / (len(view.more) + 1))
    scores, kernel = mean_scores(profiles), rotation_kernel(means) if means else None
    caption = (
        f"{options.title}{view.heading}: the positional part of the scores {mean_ending(view)} Line: mean "
        "score at each distance before the softmax, without the first key; band: its standard deviation."
    )
    if kernel is not None:
        caption += (
            " Dashed: the expected score of an independent query and key, which is what the rotation does to their "
            "means; below, how far each of its terms is from its value at distance 0, by wavelength (tokens per turn)."
        )
    figure = draw_position(scores, kernel, replace(look, caption=caption))
    edges = distance_edges(view.length, True, view.causal)
    curves = {"mean_score": scores.mean, "standard_deviation": scores.deviation}
    terms: dict[str, Tensor] = {}
    if kernel is not None:
        curves["kernel"] = kernel.total(scores.distances)
        terms = {name: getattr(kernel, name) for name in ("frequencies", "amplitude", "phase", "constant")}
    by_bin = {name: binned(values, edges, scores.distances) for name, values in curves.items()}
    heads = [
        {
            "head": head + 1,
            **{name: values[head] for name, values in by_bin.items()},
            **{name: values[head].tolist() for name, values in terms.items() if name != "frequencies"},
        }
        for head in range(len(scores.mean))
    ]
    numbers = {
        **describe_view(view, "position", view.causal, view.length, options.seed, windows=len(profiles)),
        "distances": distance_ranges(edges),
        "frequencies": None if kernel is None else kernel.frequencies.tolist(),
        "layers": [{"layer": scores.layer, "heads": heads}],
    }
    arrays = layer_arrays(scores.layer, {"distances": scores.distances, **curves, **terms})
    return Picture(figure, [], caption, numbers, arrays)


def draw_position(scores: ScoreProfile, kernel: RotationKernel | None, look: Look) -> Figure:
    """Draw the mean score of each head by distance, and below it the terms of the rotation's kernel by frequency."""
    heads, scale = look.chosen(len(scores.mean)), look.scale
    names, title, margin, bar = 0.33 * scale, 0.2 * scale, 0.17 * scale, (0.5 if kernel else 0.08) * scale
    across = (look.width - margin) / max(min(COLUMNS, len(heads)), 2)
    wide = across - names - bar
    upper, lower, gap = 0.62 * wide, (0.55 * wide if kernel else 0.0), (GAP * scale if kernel else 0.0)
    down = title + upper + lower + gap + 0.24 * scale
    page = Grid(look, len(heads), across, down, left=margin, above=0.2 * scale, below=margin)
    length, causal = int(scores.distances[-1]) + 1, int(scores.distances[0]) == 0
    edges = distance_edges(length, look.log, causal)
    for number, head in enumerate(heads):
        left, top = page.place(number)
        left, top = left + names, top + title
        axes = page.put(left, top, wide, upper)
        _draw_scores(axes, scores, kernel, head, edges, look)
        distance_axis(axes, length, causal, look.log, scale, wide)
        axes.set_title(f"Head {head + 1}", fontsize=TITLE * scale, pad=3 * scale)
        if kernel is None:
            page.name_outer_axes(axes, number, "score", distance_word(causal))
            continue
        axes.set(xticklabels=[])
        page.name_outer_axes(axes, number, "score", "")
        below = page.put(left, top + upper + gap, wide, lower)
        _draw_bands(page, below, kernel, head, edges, (left + wide + 0.06 * scale, top + upper + gap, lower))
        distance_axis(below, length, causal, look.log, scale, wide)
        below.set_xlim(axes.get_xlim())
        page.name_outer_axes(below, number, "wavelength", distance_word(causal))
    solid: dict[str, object] = {"color": SCORE, "linewidth": 1.2 * scale}
    lines = {"mean score ± standard deviation": solid}
    if kernel is not None:
        dashed = solid | {"color": KERNEL, "linestyle": "--"}
        lines["kernel of the rotation alone; below, its terms by wavelength"] = dashed
    page.add_legend(lines, ncols=2, fontsize=TICK * scale, handlelength=2.4)
    return page.figure


def _draw_scores(
    axes: Axes, scores: ScoreProfile, kernel: RotationKernel | None, head: int, edges: NDArray[np.int64], look: Look
) -> None:
    centres, lowest = bin_centres(edges, look.log), int(scores.distances[0])
    mean, deviation = (bin_means(x[head].numpy(), edges, lowest) for x in (scores.mean, scores.deviation))
    axes.fill_between(centres, mean - deviation, mean + deviation, color=SCORE, alpha=BAND, linewidth=0)
    axes.plot(centres, mean, color=SCORE, linewidth=1.1 * look.scale)
    drawn = [mean - deviation, mean + deviation]
    if kernel is not None:
        total = bin_means(kernel.total(scores.distances)[head].numpy(), edges, lowest)
        axes.plot(centres, total, color=KERNEL, linewidth=1.1 * look.scale, linestyle="--")
        drawn.append(total)
    low, high = min(float(np.nanmin(x)) for x in drawn), max(float(np.nanmax(x)) for x in drawn)
    margin = 0.04 * (high - low) or 0.1
    ticks = linear_ticks(low - margin, high + margin)[::2]
    axes.set_ylim(low - margin, high + margin)
    axes.set_yticks(ticks, tick_words(ticks))


def _draw_bands(
    page: Page, axes: Axes, kernel: RotationKernel, head: int, edges: NDArray[np.int64], bar: tuple[float, float, float]
) -> None:
    """The term of each frequency by distance, as the mean of each cell: short wavelengths on top."""
    distances = torch.arange(int(edges[0]), int(edges[-1]))
    # A constant cancels in the softmax, and the slowest terms are nearly constant: all are counted from distance 0.
    terms = kernel.bands(distances)[head] - kernel.bands(torch.zeros(1))[head]
    values = bin_means(terms.numpy(), edges, int(edges[0]))  # (bands, bins)
    bands = len(values)
    most = float(np.abs(values).max()) or 1.0
    scale = ColourScale(-most, most, log=False, signed=True)
    image = axes.pcolormesh(
        edges - 0.5, np.arange(bands + 1) - 0.5, values, cmap=BOTH_SIGNS, norm=Normalize(-most, most), rasterized=True
    )
    axes.set_ylim(bands - 0.5, -0.5)
    waves = kernel.wavelengths.numpy()
    ticks = np.linspace(0, bands - 1, 4 if bands > 4 else bands).round().astype(int)
    axes.set_yticks(ticks, [_tokens(waves[tick]) for tick in ticks])
    draw_bar(page, *bar, image, scale)


def _tokens(wavelength: float) -> str:
    """A wavelength in tokens with at most two digits before a unit."""
    if wavelength < 1000:
        return f"{wavelength:.0f}"
    return f"{wavelength / 1000:.0f}k" if wavelength < 1e6 else f"{wavelength / 1e6:.0f}M"
