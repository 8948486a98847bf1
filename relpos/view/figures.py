"""Heat maps of all heads on one page, as in the paper's appendix."""

import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colorbar import Colorbar
from matplotlib.colors import CenteredNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, MultipleLocator
from numpy.typing import NDArray

COLUMNS = 3
FORMATS = (".png", ".pdf", ".svg")
STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "pdf.fonttype": 42,  # embedded TrueType: text stays text
    "svg.fonttype": "none",
    "figure.dpi": 100,
    "savefig.dpi": 200,
}


def draw_heads(maps: NDArray[np.float32], caption: str = "") -> Figure:
    """One panel a head, three in a row, each with its own colour bar. maps: (heads, length, length)."""
    heads = len(maps)
    columns = min(COLUMNS, heads)
    rows = math.ceil(heads / columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2.55 * columns, 2.1 * rows + 0.3), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(rows, columns, squeeze=False).flat
        signed = any(has_both_signs(values) for values in maps)  # one kind of colour map a page
        for head, panel in enumerate(panels):
            if head < heads:
                draw_map(panel, maps[head], f"Head {head + 1}", signed)
            else:
                panel.set_axis_off()
        if caption:
            figure.supxlabel(caption, fontsize=8)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once; every format is saved from it
    return figure


def has_both_signs(values: NDArray[np.float32]) -> bool:
    """Whether positive and negative values both matter: the smaller side is at least a tenth of the larger."""
    seen = values[np.isfinite(values)]
    below, above = sorted((-float(seen.min()), float(seen.max())))
    return below > 0.1 * above


def draw_map(panel: Axes, values: NDArray[np.float32], title: str, signed: bool) -> Colorbar:
    """One head: row 0 on top, what is not seen left blank.

    Sequential colours for values of one sign; centred on 0 where both occur, so that the colour tells the sign.
    """
    finite = np.ma.masked_invalid(values)
    norm = CenteredNorm() if signed else Normalize()
    image = panel.imshow(finite, cmap="RdBu_r" if signed else "viridis", norm=norm, interpolation="nearest")
    panel.set_title(title, pad=3)
    step = (
        MaxNLocator(nbins=6, integer=True) if len(values) < 200 else MultipleLocator(100 * max(1, len(values) // 500))
    )
    panel.xaxis.set_major_locator(step)
    panel.yaxis.set_major_locator(step)
    panel.tick_params(length=2, labelsize=7)
    figure = panel.get_figure()
    assert figure is not None
    bar = figure.colorbar(image, ax=panel, fraction=0.05, pad=0.03)
    bar.locator = MaxNLocator(nbins=9, steps=[1, 2, 2.5, 5, 10])
    if finite.min() < finite.max():
        bar.ax.set_ylim(float(finite.min()), float(finite.max()))  # only what occurs
    bar.ax.tick_params(length=2, labelsize=7)
    bar.update_ticks()
    return bar


def bar_ticks(figure: Figure) -> list[list[float]]:
    """The ticks that each head's colour bar shows, read from the drawn figure."""
    figure.canvas.draw()
    bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    shown = []
    for axes in bars:
        low, high = sorted(axes.get_ylim())
        margin = 1e-6 * (high - low)
        shown.append([float(tick) for tick in axes.get_yticks() if low - margin <= tick <= high + margin])
    return shown


def save(figure: Figure, path: Path) -> Path:
    """Write the figure to a .png, .pdf or .svg file, making its folder."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"cannot write a picture to {path.name!r}: the name must end in {', '.join(FORMATS)}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        figure.savefig(path)
    return path
