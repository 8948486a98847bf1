"""The positional part of rotary heads: mean score by distance, the rotation's kernel, and its terms by frequency."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from relpos.maps.bins import bin_centres, bin_means, distance_edges
from relpos.maps.heads.positional_part import RotationKernel, ScoreProfile
from relpos.pictures.colours import BOTH_SIGNS, linear_ticks, tick_words
from relpos.pictures.figures import WIDTHS
from relpos.pictures.heatmaps import draw_bar
from relpos.pictures.printed_page import NAME, TICK, TITLE, Page, text_scale
from relpos.pictures.profiles import label_distances

COLUMNS = 3  # heads beside each other
SCORE, KERNEL = "#0072B2", "#D55E00"  # Okabe and Ito's blue and vermilion
BAND = 0.15  # opacity of the standard deviation
GAP = 0.1  # inches between the two panels of a head


def draw_position(
    scores: ScoreProfile,
    kernel: RotationKernel | None,
    chosen: Sequence[int] | None = None,
    caption: str = "",
    width: float = WIDTHS[2],
    log: bool = False,
    banner: str = "",
) -> Figure:
    """Draw the mean score of each head by distance, and below it the terms of the rotation's kernel by frequency.

    Args:
        scores: Mean and standard deviation by distance of one layer.
        kernel: The rotation's kernel; None for a layer that does not rotate.
        chosen: Heads to draw; 0 is the first. All by default.
        caption: Text below the panels.
        width: Width of the page in inches.
        log: Whether the distance axis is logarithmic.
        banner: Text above the panels.

    Returns:
        The figure.
    """
    heads = list(range(len(scores.mean))) if chosen is None else list(chosen)
    columns = min(COLUMNS, len(heads))
    scale = text_scale(width)
    names, title, axis_label, bar = 0.33 * scale, 0.2 * scale, 0.17 * scale, (0.5 * scale if kernel else 0.08 * scale)
    across = (width - axis_label) / max(columns, 2)
    wide = across - names - bar
    upper, lower = 0.62 * wide, (0.55 * wide if kernel else 0.0)
    down = title + upper + lower + (GAP * scale if kernel else 0) + 0.24 * scale
    legend = 0.2 * scale
    rows = math.ceil(len(heads) / columns)
    page = Page(axis_label + across * columns, legend + down * rows + axis_label, scale, caption, banner)
    length, causal = int(scores.distances[-1]) + 1, int(scores.distances[0]) == 0
    edges = distance_edges(length, log, causal)
    for place, head in enumerate(heads):
        left = axis_label + place % columns * across + names
        top = legend + place // columns * down + title
        axes = page.put(left, top, wide, upper)
        _draw_scores(axes, scores, kernel, head, edges, log, scale)
        label_distances(axes, length, causal, log, scale, wide)
        axes.set_title(f"Head {head + 1}", fontsize=TITLE * scale, pad=3 * scale)
        last = place + columns >= len(heads)
        if kernel is not None:
            axes.set(xlabel="", xticklabels=[])
            below = page.put(left, top + upper + GAP * scale, wide, lower)
            _draw_bands(
                page, below, kernel, head, edges, (left + wide + 0.06 * scale, top + upper + GAP * scale, lower)
            )
            label_distances(below, length, causal, log, scale, wide)
            below.set_xlim(axes.get_xlim())
            if not last:
                below.set_xlabel("")
            if place % columns == 0:
                below.set_ylabel("wavelength", fontsize=NAME * scale, labelpad=2 * scale)
        elif not last:
            axes.set_xlabel("")
        if place % columns == 0:
            axes.set_ylabel("score", fontsize=NAME * scale, labelpad=2 * scale)
    _draw_legend(page, kernel is not None, scale)
    return page.figure


def _draw_legend(page: Page, rotates: bool, scale: float) -> None:
    lines = [Line2D([], [], color=SCORE, linewidth=1.2 * scale)]
    words = ["mean score ± standard deviation"]
    if rotates:
        lines.append(Line2D([], [], color=KERNEL, linewidth=1.2 * scale, linestyle="--"))
        words.append("kernel of the rotation alone; below, its terms by wavelength")
    page.figure.legend(
        lines,
        words,
        loc="upper center",
        bbox_to_anchor=(0.5, 1 - page.top / page.height),
        ncols=2,
        frameon=False,
        fontsize=TICK * scale,
        handlelength=2.4,
        borderaxespad=0.0,
    )


def _draw_scores(
    axes: Axes,
    scores: ScoreProfile,
    kernel: RotationKernel | None,
    head: int,
    edges: NDArray[np.int64],
    log: bool,
    scale: float,
) -> None:
    centres, lowest = bin_centres(edges, log), int(scores.distances[0])
    mean, deviation = (bin_means(x[head].numpy(), edges, lowest) for x in (scores.mean, scores.deviation))
    axes.fill_between(centres, mean - deviation, mean + deviation, color=SCORE, alpha=BAND, linewidth=0)
    axes.plot(centres, mean, color=SCORE, linewidth=1.1 * scale)
    drawn = [mean - deviation, mean + deviation]
    if kernel is not None:
        total = bin_means(kernel.total(scores.distances)[head].numpy(), edges, lowest)
        axes.plot(centres, total, color=KERNEL, linewidth=1.1 * scale, linestyle="--")
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
    image = axes.pcolormesh(
        edges - 0.5, np.arange(bands + 1) - 0.5, values, cmap=BOTH_SIGNS, norm=Normalize(-most, most), rasterized=True
    )
    axes.set_ylim(bands - 0.5, -0.5)
    waves = kernel.wavelengths.numpy()
    ticks = np.linspace(0, bands - 1, 4 if bands > 4 else bands).round().astype(int)
    axes.set_yticks(ticks, [_tokens(waves[tick]) for tick in ticks])
    draw_bar(page, *bar, image, (-most, most))


def _tokens(wavelength: float) -> str:
    """A wavelength in tokens with at most two digits before a unit."""
    if wavelength < 1000:
        return f"{wavelength:.0f}"
    return f"{wavelength / 1000:.0f}k" if wavelength < 1e6 else f"{wavelength / 1e6:.0f}M"
