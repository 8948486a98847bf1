"""The layout of a printed page: axes placed in inches, text sizes, a caption below, and ticks of positions."""

import textwrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import MaxNLocator

from relpos.pictures.figures import WIDTHS

TICK, NAME, TITLE = 7.0, 8.0, 9.0  # points of a tick label, an axis label and a panel's title, on two columns


class Page:
    """A figure whose axes are placed by hand: sizes in inches, from the top left, below the banner."""

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
        """Add axes at a place of the page."""
        below = self.top + top + height
        box = (left / self.width, 1 - below / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box, label=label)
        axes.tick_params(length=2 * self.scale, width=0.6 * self.scale, pad=2 * self.scale, labelsize=TICK * self.scale)
        for spine in axes.spines.values():
            spine.set_linewidth(0.6 * self.scale)
        return axes


def text_scale(width: float) -> float:
    """Size of text and lines on a page of `width` inches, relative to two columns."""
    return min(1.0, max(0.6, width / WIDTHS[2]))


def text_width(text: str, points: float) -> float:
    """Width of a line of text in inches."""
    wide, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=points), ismath=False)
    return float(wide) / 72


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


def position_word(position: int, length: int) -> str:
    """The label of a position on an axis of `length` tokens: in thousands where it would be long."""
    return f"{position // 1000}k" if length > 10_000 and position >= 1000 else str(position)
