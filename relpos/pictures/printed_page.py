"""Figures as printed pages: panels placed in inches, sizes of text, a caption, axes of positions; and their files."""

import io
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.textpath import text_to_path
from matplotlib.ticker import MaxNLocator

from relpos.pictures.draw_options import FORMATS, WIDTHS
from relpos.system.files import write_bytes

SAVED: Any = {"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "relpos"}  # text stays text, fonts embedded
TICK, NAME, TITLE = 7.0, 8.0, 9.0  # points of a tick label, an axis label and a panel's title, on two columns
COLUMNS = 3  # panels beside each other
COLOUR_BAR = "<colorbar>"  # label of the axes of a colour bar


@dataclass(frozen=True)
class Look:
    """What the figures of heads have in common."""

    heads: Sequence[int] | None = None  # to draw, 0 is the first; all by default
    caption: str = ""  # below the panels
    captioned: bool = True  # whether the caption is part of the figure
    banner: str = ""  # above the panels
    width: float = WIDTHS[2]  # of the page in inches
    log: bool = False  # whether distances are logarithmic
    shared: bool = False  # whether all panels share one colour scale
    labels: Sequence[str] | None = None  # names of the tokens, shown instead of their positions

    @property
    def scale(self) -> float:
        """Size of text and lines, relative to a page of two columns."""
        return min(1.0, max(0.6, self.width / WIDTHS[2]))

    def chosen(self, heads: int) -> list[int]:
        """The heads to draw of a layer with this many."""
        return list(range(heads)) if self.heads is None else list(self.heads)


class Page:
    """A figure whose axes are placed by hand: sizes in inches, from the top left, below the banner."""

    def __init__(self, width: float, height: float, scale: float, caption: str, banner: str = "") -> None:
        size = NAME * scale
        lines = wrap_evenly(caption, max(24, int(width * 126 / size)))
        self.top = 0.2 * scale if banner else 0.0
        below = self.top + height
        self.scale, self.width, self.height = scale, width, below + len(lines) * size * 1.3 / 72 + 0.08
        self.figure = Figure(figsize=(self.width, self.height))
        FigureCanvasAgg(self.figure)
        middle: Any = {"ha": "center", "va": "top", "parse_math": False}
        if lines:
            text = "\n".join(lines)
            self.figure.text(0.5, 1 - below / self.height, text, size=size, linespacing=1.2, **middle)
        if banner:
            self.figure.text(0.5, 1 - 0.04 * scale / self.height, banner, size=TITLE * scale, style="italic", **middle)

    def height_at(self, top: float) -> float:
        """The figure's own coordinate, from 0 at the bottom to 1, of a height in inches from the top."""
        return 1 - (self.top + top) / self.height

    def put(self, left: float, top: float, width: float, height: float, label: str = "") -> Axes:
        """Add axes at a place of the page."""
        box = (left / self.width, self.height_at(top + height), width / self.width, height / self.height)
        axes = self.figure.add_axes(box, label=label)
        axes.tick_params(length=2 * self.scale, width=0.6 * self.scale, pad=2 * self.scale, labelsize=TICK * self.scale)
        for spine in axes.spines.values():
            spine.set_linewidth(0.6 * self.scale)
        return axes

    def name_axes(self, axes: Axes, down: str, across: str) -> None:
        """Name the axes of a panel."""
        axes.set_ylabel(down, fontsize=NAME * self.scale, labelpad=2 * self.scale)
        axes.set_xlabel(across, fontsize=NAME * self.scale, labelpad=1 * self.scale)

    def add_legend(self, lines: Mapping[str, Mapping[str, Any]], **options: Any) -> None:
        """Add a legend of lines by name, by default in the middle of the top."""
        handles = [Line2D([], [], **line) for line in lines.values()]
        middle = {"loc": "upper center", "bbox_to_anchor": (0.5, self.height_at(0.0)), "borderaxespad": 0.0}
        self.figure.legend(handles, list(lines), **{**middle, "frameon": False, **options})

    def add_note(self, text: str, top: float) -> None:
        """Add a line of small text."""
        self.figure.text(0.5, self.height_at(top), text, size=TICK * self.scale, ha="center", va="top")


class Grid(Page):
    """A page of panels in rows: a place of `across` × `down` inches for each, and margins around all of them."""

    def __init__(
        self,
        look: Look,
        count: int,
        across: float,
        down: float,
        columns: int | None = None,
        *,
        left: float = 0.0,
        above: float = 0.0,
        right: float = 0.0,
        below: float = 0.0,
        least: float = 0.0,
    ) -> None:
        self.columns = columns or min(COLUMNS, count)
        self.count, self.across, self.down, self.left, self.above = count, across, down, left, above
        self.high = max(above + down * math.ceil(count / self.columns) + below, least)
        caption = look.caption if look.captioned else ""
        super().__init__(left + across * self.columns + right, self.high, look.scale, caption, look.banner)

    def place(self, number: int) -> tuple[float, float]:
        """The left and upper end of the place of a panel; 0 is the first."""
        return self.left + number % self.columns * self.across, self.above + number // self.columns * self.down

    def name_outer_axes(self, axes: Axes, number: int, down: str, across: str) -> None:
        """Name the vertical axis of the first panel in each row, and the horizontal one of the last in each column."""
        first, last = number % self.columns == 0, number + self.columns >= self.count
        self.name_axes(axes, down if first else "", across if last else "")


def wrap_evenly(text: str, most: int) -> list[str]:
    """Break a text into as few lines of at most `most` letters as possible, about equally long: no line of one word.

    "head_dim 64" and "2 × 2" stay on one line.
    """
    text = re.sub(r"(?<=head_dim) | (?=×)|(?<=×) ", "\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(text, most)
    for width in range(most - 1, 0, -1):
        narrower = textwrap.wrap(text, width, break_long_words=False)
        if len(narrower) > len(lines) or max(map(len, narrower), default=0) > width:
            break
        lines = narrower
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def text_width(text: str, points: float) -> float:
    """Width of a line of text in inches."""
    wide, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=points), ismath=False)
    return float(wide) / 72


def position_word(position: int, length: int) -> str:
    """The label of a position on an axis of `length` tokens: in thousands where it would be long."""
    return f"{position // 1000}k" if length > 10_000 and position >= 1000 else str(position)


def position_ticks(length: int, wide: float, scale: float) -> tuple[list[int], list[str]]:
    """Ticks for positions or distances from 0 to length − 1, on an axis `wide` inches long, and their labels."""
    word = text_width(position_word(length - 1, length), TICK * scale)
    most = max(2, min(5, int(wide / (1.2 * word))))  # that fit beside each other
    if 200 <= length <= 600 and most == 5:
        ticks = list(range(0, length, 100))  # as in the paper
    else:
        candidates = MaxNLocator(nbins=most, integer=True, steps=[1, 2, 2.5, 5, 10]).tick_values(0, length - 1)
        ticks = [int(tick) for tick in candidates if 0 <= tick < length]
    return ticks, [position_word(tick, length) for tick in ticks]


def distance_word(causal: bool) -> str:
    """The label of an axis of distances."""
    return "distance" if causal else "distance (query − key)"


def distance_axis(axes: Axes, length: int, causal: bool, log: bool, scale: float, wide: float) -> None:
    """Set scale and ticks of an axis of distances that is `wide` inches long."""
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


def write(figure: Figure, suffix: str) -> bytes:
    """The contents of a .png, .pdf or .svg file: the same bytes for the same figure.

    A .pdf or .svg file has every heat map as an image of exactly its cells, which the viewer scales.
    """
    if suffix.lower() not in FORMATS:
        raise ValueError(f"cannot write a picture as {suffix or 'nothing'}: the name must end in {', '.join(FORMATS)}.")
    data = io.BytesIO()
    undated = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    with mpl.rc_context(SAVED), native_cells(figure) if suffix.lower() in undated else nullcontext():
        figure.savefig(data, format=suffix[1:].lower(), metadata=undated.get(suffix.lower(), {}), dpi=200)
    return data.getvalue()


@contextmanager
def native_cells(figure: Figure) -> Iterator[None]:
    """Within this context, images are not resampled to the dots of a page where the format can scale them."""
    images = [image for axes in figure.axes for image in axes.images]
    before = [image.get_interpolation() for image in images]
    for image in images:
        image.set_interpolation("none")
    try:
        yield
    finally:
        for image, interpolation in zip(images, before, strict=True):
            image.set_interpolation(interpolation)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure to a .png, .pdf or .svg file, creating its folder."""
    data = write(figure, path.suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, data)
    return path
