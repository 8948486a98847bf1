"""The pages: heat maps of all heads as in the paper's appendix, a contact sheet of all layers, profiles."""

import io
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, MultipleLocator
from numpy.typing import NDArray

from relpos.lab.atomic import write_bytes
from relpos.view.maps import Map

COLUMNS = 3  # of panels
FORMATS = (".png", ".pdf", ".svg")
WIDTHS = {1: 3.33, 2: 7.0}  # inches of one and of two columns of a page
BAR, LABEL = 0.085, 4.5  # inches a colour bar is wide, points of a token's name
LEAST_WEIGHT = 1e-4  # weights below it have one colour
# Lightness rises from end to end, in both maps: printed grey, and for the colour-blind, more is lighter. The second one
# is grey at 0, blue below and yellow above.
ONE_SIGN = "viridis"
BOTH_SIGNS = LinearSegmentedColormap.from_list(
    "blue-grey-yellow", ["#081d58", "#2c5fb4", "#8d8f94", "#eda93b", "#fff09a"], N=512
)


SAVED: Any = {"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "relpos"}  # text stays text, fonts embedded


class Page:
    """A page of some width in inches, on which everything is put by hand: sizes in inches, from the top left."""

    def __init__(self, width: float, height: float, scale: float, caption: str) -> None:
        size = 8 * scale
        lines = textwrap.wrap(caption, max(24, int(width * 126 / size)))
        self.scale, self.width, self.height = scale, width, height + len(lines) * size * 1.3 / 72 + 0.08
        self.figure = Figure(figsize=(self.width, self.height))
        FigureCanvasAgg(self.figure)
        if lines:
            below = height / self.height
            self.figure.text(
                0.5, 1 - below, "\n".join(lines), ha="center", va="top", size=size, linespacing=1.2, parse_math=False
            )

    def put(self, left: float, top: float, width: float, height: float, label: str = "") -> Axes:
        """Axes at a place of the page."""
        box = (left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box, label=label)
        axes.tick_params(length=2 * self.scale, width=0.6 * self.scale, pad=2 * self.scale, labelsize=7 * self.scale)
        for spine in axes.spines.values():
            spine.set_linewidth(0.6 * self.scale)
        return axes

    def bar(self, axes: Axes, image: Any, span: tuple[float, float]) -> None:
        """A colour bar that shows what occurs."""
        bar = self.figure.colorbar(image, cax=axes)
        bar.outline.set_linewidth(0.6 * self.scale)
        if not isinstance(image.norm, LogNorm):
            bar.locator = MaxNLocator(nbins=9, steps=[1, 2, 2.5, 5, 10])
        if span[0] < span[1]:
            bar.ax.set_ylim(*span)
        else:
            bar.locator = FixedLocator([span[0]])  # a constant map has one value
        bar.update_ticks()
        bar.minorticks_off()
        bar.ax.tick_params(labelsize=7 * self.scale)
        bar.ax.yaxis.get_offset_text().set_fontsize(6 * self.scale)


def text_scale(width: float) -> float:
    """How much smaller text and lines are on a page of so many inches than on two columns."""
    return min(1.0, max(0.6, width / WIDTHS[2]))


def draw_heads(
    found: Map,
    chosen: Sequence[int] | None = None,
    caption: str = "",
    labels: Sequence[str] | None = None,
    shared: bool = False,
    width: float = WIDTHS[2],
) -> Figure:
    """One panel a head, three in a row, each with its own colour bar, or one for all of them.

    chosen   heads to draw, 0 is the first; all unless given
    labels   of the tokens, instead of their index
    """
    heads = list(range(found.heads)) if chosen is None else list(chosen)
    columns = min(COLUMNS, len(heads))
    rows = math.ceil(len(heads) / columns)
    scale = text_scale(width)
    longest = max((len(label) for label in labels or ()), default=0)
    names = scale * (0.32 if labels is None else 0.1 + LABEL / 72 * 0.62 * longest)  # room for the tokens' names
    below = names if labels else 0.2 * scale
    beside, title, bars = 0.58 * scale, 0.2 * scale, BAR * scale
    across = (width - beside * shared) / max(columns, 2 if labels is None else 1)  # one head alone takes half a page
    side = across - names - (0.1 * scale if shared else beside)
    down = title + side + below
    page = Page(across * columns + beside * shared, down * rows, scale, caption)
    colours = Colours([found], heads, shared)
    for place, head in enumerate(heads):
        left, top = place % columns * across + names, place // columns * down + title
        axes = page.put(left, top, side, side)
        image = draw_map(axes, found, head, colours, labels, scale)
        axes.set_title(f"Head {head + 1}", pad=3 * scale, fontsize=9 * scale)
        if not shared:
            bar = page.put(left + side + 0.06 * scale, top, bars, side, "<colorbar>")
            page.bar(bar, image, colours.range(found, head))
    if shared:
        bar = page.put(across * columns, title, bars, min(side, 3 * scale), "<colorbar>")
        page.bar(bar, image, colours.range(found, heads[0]))
    return page.figure


def draw_sheet(
    maps: Sequence[Map],
    chosen: Sequence[int] | None = None,
    caption: str = "",
    shared: bool = False,
    width: float = WIDTHS[2],
) -> Figure:
    """A contact sheet: a row a layer, a column a head, the range of each printed below it."""
    heads = list(range(maps[0].heads)) if chosen is None else list(chosen)
    scale = text_scale(width)
    names, title, beside = 0.25 * scale, 0.2 * scale, 0.6 * scale * shared
    side = (width - names - beside) / max(len(heads), 4)
    small, roomy = max(3.0, min(7.0, 8 * side)), side > 0.4
    below = 0.03 if shared else small * 1.5 / 72
    page = Page(names + side * len(heads) + beside, title + (side + below) * len(maps) + 0.05, scale, caption)
    colours = Colours(maps, heads, shared)
    for row, found in enumerate(maps):
        for column, head in enumerate(heads):
            axes = page.put(names + column * side, title + row * (side + below), 0.93 * side, 0.93 * side)
            image = draw_map(axes, found, head, colours, None, scale)
            axes.set(xticks=[], yticks=[])
            if not shared:
                low, high = found.range(head)
                axes.set_xlabel(f"{_short(low)} … {_short(high)}", fontsize=small, labelpad=1)
            if row == 0:
                axes.set_title(f"{'Head ' * roomy}{head + 1}", fontsize=min(9 * scale, small + 2), pad=2)
            if column == 0:
                axes.set_ylabel(f"{'Layer ' * roomy}{found.layer}", fontsize=min(9 * scale, small + 2), labelpad=2)
    if shared:
        bar = page.put(page.width - beside + 0.05, title, BAR * scale, min(len(maps) * side, 3 * scale), "<colorbar>")
        page.bar(bar, image, colours.range(maps[0], heads[0]))
    return page.figure


def draw_profiles(
    maps: Sequence[Map], chosen: Sequence[int] | None = None, caption: str = "", width: float = WIDTHS[2]
) -> Figure:
    """Value against distance, a line a head and a panel a layer.

    Where a diagonal has several values the line is their mean, and a band goes from the smallest to the largest.
    """
    heads = list(range(maps[0].heads)) if chosen is None else list(chosen)
    columns = min(COLUMNS, len(maps))
    scale = text_scale(width)
    names, title, legend = 0.55 * scale, 0.22 * scale, 0.75 * scale
    across = (width - legend) / max(columns, 1.6)  # one panel alone takes more than half a page
    high = 0.68 * across
    down = title + high + 0.42 * scale
    least = (0.14 * len(heads) + 0.2) * scale  # of the legend
    page = Page(across * columns + legend, max(down * math.ceil(len(maps) / columns), least), scale, caption)
    lines = mpl.colormaps[ONE_SIGN](np.linspace(0, 0.9, max(len(heads), 2)))
    for place, found in enumerate(maps):
        top = place // columns * down + title
        axes = page.put(place % columns * across + names, top, across - names - 0.1 * scale, high)
        distance = np.arange(found.length)
        for head, colour in zip(heads, lines, strict=False):
            lowest, mean, highest = found.profile[:, head]
            if (lowest < highest).any():
                axes.fill_between(distance, lowest, highest, color=colour, alpha=0.12, linewidth=0)
            axes.plot(distance, mean, color=colour, linewidth=0.9 * scale, label=f"Head {head + 1}")
        axes.set_xlabel("distance", fontsize=8 * scale, labelpad=1)
        axes.set_ylabel(found.show, fontsize=8 * scale, labelpad=2)
        axes.margins(x=0.01)
        axes.set_title(f"Layer {found.layer}" if len(maps) > 1 else "", fontsize=9 * scale, pad=3 * scale)
    page.figure.legend(
        *axes.get_legend_handles_labels(),
        loc="upper right",
        bbox_to_anchor=(1, 1 - title / page.height),
        frameon=False,
        fontsize=7 * scale,
        handlelength=1.2,
        borderaxespad=0.2,
    )
    return page.figure


class Colours:
    """The colour map of a page, and the scale of each of its panels."""

    def __init__(self, maps: Sequence[Map], heads: Sequence[int], shared: bool) -> None:
        ranges = [found.range(head) for found in maps for head in heads]
        self.weights = maps[0].show == "weights"
        self.signed = not self.weights and any(both_signs(low, high) for low, high in ranges)  # one map a page
        self.all = (min(low for low, _ in ranges), max(high for _, high in ranges)) if shared else None
        self.name = BOTH_SIGNS if self.signed else ONE_SIGN

    def range(self, found: Map, head: int) -> tuple[float, float]:
        """What the colour bar of a head shows: what occurs in it, or on the page."""
        low, high = self.all or found.range(head)
        return (max(low, LEAST_WEIGHT), max(high, 2 * LEAST_WEIGHT)) if self.weights else (low, high)

    def norm(self, found: Map, head: int) -> Normalize:
        """From value to colour: centred on 0 where both signs occur, logarithmic for weights."""
        low, high = self.range(found, head)
        if self.signed:
            most = max(abs(low), abs(high)) or 1.0
            return Normalize(-most, most)
        if self.weights:
            return LogNorm(low, high, clip=True)
        return Normalize(low if low < high else low - 1, high)


def both_signs(low: float, high: float) -> bool:
    """Whether positive and negative values both matter: the smaller side is at least a tenth of the larger."""
    below, above = sorted((-low, high))
    return below > 0.1 * above


def draw_map(axes: Axes, found: Map, head: int, colours: Colours, labels: Sequence[str] | None, scale: float) -> Any:
    """One head: row 0 on top, what is not seen left blank. The mean of a cell is drawn."""
    values: NDArray[np.float32] = np.ma.masked_invalid(found.mean[head])
    if colours.weights:
        values = np.ma.maximum(values, LEAST_WEIGHT)
    end = len(values) * found.cell - 0.5
    image = axes.imshow(
        values,
        cmap=colours.name,
        norm=colours.norm(found, head),
        extent=(-0.5, end, end, -0.5),
        interpolation="auto",  # cells that are smaller than a dot are averaged, larger ones stay sharp
    )
    axes.set(xlim=(-0.5, found.length - 0.5), ylim=(found.length - 0.5, -0.5))
    for axis, turn in ((axes.xaxis, 90), (axes.yaxis, 0)):
        if labels is None:
            hundreds = 200 <= found.length <= 600
            axis.set_major_locator(
                MultipleLocator(100) if hundreds else MaxNLocator(nbins=5, integer=True, steps=[1, 2, 5, 10])
            )
        else:
            axis.set_ticks(range(found.length), labels, rotation=turn, fontsize=LABEL * scale, family="monospace")
            for label in axis.get_ticklabels():
                label.set_parse_math(False)  # a token may be a dollar sign
    return image


def _short(value: float) -> str:
    """Three digits, with a true minus, and none before 0."""
    return f"{value + 0.0:.3g}".replace("-", "−")


def bar_ticks(figure: Figure) -> list[list[float]]:
    """The ticks that each colour bar shows, read from the drawn figure."""
    bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    shown = []
    for axes in bars:
        low, high = sorted(axes.get_ylim())
        margin = 1e-6 * (high - low)
        shown.append([float(tick) for tick in axes.get_yticks() if low - margin <= tick <= high + margin])
    return shown


def write(figure: Figure, suffix: str) -> bytes:
    """The figure as the contents of a .png, .pdf or .svg file: the same bytes for the same figure."""
    if suffix.lower() not in FORMATS:
        raise ValueError(f"cannot write a picture as {suffix or 'nothing'}: the name must end in {', '.join(FORMATS)}.")
    data = io.BytesIO()
    dates: dict[str, Any] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    with mpl.rc_context(SAVED):
        figure.savefig(data, format=suffix[1:].lower(), metadata=dates.get(suffix.lower(), {}), dpi=200)
    return data.getvalue()


def save(figure: Figure, path: Path) -> Path:
    """Write the figure to a .png, .pdf or .svg file, making its folder."""
    data = write(figure, path.suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, data)
    return path
