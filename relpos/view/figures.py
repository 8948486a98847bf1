"""A page that axes are put on by hand, with its caption, and the files it is written to."""

import io
import textwrap
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import MaxNLocator

from relpos.system.files import write_bytes

FORMATS = (".png", ".pdf", ".svg")
WIDTHS = {1: 3.33, 2: 7.0}  # inches of one and of two columns of a page
TICK, NAME, TITLE = 7.0, 8.0, 9.0  # points of a tick's number, of an axis' name and of a panel's title, on two columns
SAVED: Any = {"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "relpos"}  # text stays text, fonts embedded


class Page:
    """A page of some width in inches: sizes in inches, from the top left, below the banner."""

    def __init__(self, width: float, height: float, scale: float, caption: str, banner: str = "") -> None:
        size = NAME * scale
        lines = textwrap.wrap(caption, max(24, int(width * 126 / size)))
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

    def put(self, left: float, top: float, width: float, height: float, label: str = "") -> Axes:
        """Axes at a place of the page."""
        below = self.top + top + height
        box = (left / self.width, 1 - below / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box, label=label)
        axes.tick_params(length=2 * self.scale, width=0.6 * self.scale, pad=2 * self.scale, labelsize=TICK * self.scale)
        for spine in axes.spines.values():
            spine.set_linewidth(0.6 * self.scale)
        return axes


def text_scale(width: float) -> float:
    """How much smaller text and lines are on a page of so many inches than on two columns."""
    return min(1.0, max(0.6, width / WIDTHS[2]))


def text_width(text: str, points: float) -> float:
    """Inches that a line of text is wide."""
    wide, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=points), ismath=False)
    return float(wide) / 72


def position_ticks(length: int, wide: float, scale: float) -> tuple[list[int], list[str]]:
    """The positions (or distances) that an axis of `length` tokens names, and how; the axis is `wide` inches."""
    word = text_width(position_word(length - 1, length), TICK * scale)
    most = max(2, min(5, int(wide / (1.2 * word))))  # that stand beside each other without touching
    if 200 <= length <= 600 and most == 5:
        ticks = list(range(0, length, 100))  # as printed
    else:
        found = MaxNLocator(nbins=most, integer=True, steps=[1, 2, 2.5, 5, 10]).tick_values(0, length - 1)
        ticks = [int(tick) for tick in found if 0 <= tick < length]
    return ticks, [position_word(tick, length) for tick in ticks]


def position_word(position: int, length: int) -> str:
    """A position as it stands on an axis of so many tokens: in thousands where it would be long."""
    return f"{position // 1000}k" if length > 10_000 and position >= 1000 else str(position)


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
