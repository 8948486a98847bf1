"""A contact sheet: small heat maps of every head of several layers."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from relpos.maps.map import Map
from relpos.pictures.colours import Colours
from relpos.pictures.figures import WIDTHS
from relpos.pictures.head_notes import ZERO, head_note
from relpos.pictures.heatmaps import ACROSS, DOWN, bar_room, draw_bar, draw_map
from relpos.pictures.printed_page import TICK, TITLE, Page, text_scale, text_width


def draw_sheet(
    maps: Sequence[Map],
    chosen: Sequence[int] | None = None,
    caption: str = "",
    shared: bool = False,
    width: float = WIDTHS[2],
    banner: str = "",
) -> Figure:
    """Draw a contact sheet: one row per layer, one column per head, the range of each panel below it.

    Args:
        maps: One map per layer.
        chosen: Heads to draw; 0 is the first. All by default.
        caption: Text below the panels.
        shared: Whether all panels share one colour scale, which a single colour bar shows instead of the ranges.
        width: Width of the page in inches.
        banner: Text above the panels.

    Returns:
        The figure.
    """
    heads = list(range(maps[0].heads)) if chosen is None else list(chosen)
    scale = text_scale(width)
    names, title, beside = 0.25 * scale, 0.2 * scale, bar_room(maps[0], heads, Colours(maps, heads, True), scale)
    side = (width - names - beside * shared) / max(len(heads), 4)
    roomy = side > 0.4
    head_size = min(TITLE * scale, max(5.0, 8 * side + 2))
    ranges = [[_range_words(layer_map, head) for head in heads] for layer_map in maps]
    widest = max(text_width(line, 1.0) for row in ranges for words in row for line in words.split("\n"))
    small = min(TICK, 0.9 * side / widest)  # so that no label reaches into the next column
    below = 0.03 if shared else small * 2 * 1.3 / 72 + 0.03
    high = title + (side + below) * len(maps) + 0.2 * scale
    page = Page(names + side * len(heads) + beside * shared, high, scale, caption, banner)
    colours = Colours(maps, heads, shared)
    for row, layer_map in enumerate(maps):
        for column, head in enumerate(heads):
            axes = page.put(names + column * side, title + row * (side + below), 0.93 * side, 0.93 * side)
            image = draw_map(axes, layer_map, head, colours)
            axes.set(xticks=[], yticks=[])
            if not shared:
                axes.set_xlabel(ranges[row][column], fontsize=small, labelpad=1, linespacing=1.1)
            if row == 0:
                axes.set_title(f"{'Head ' * roomy}{head + 1}", fontsize=head_size, pad=2)
            if column == 0:
                axes.set_ylabel(f"{'Layer ' * roomy}{layer_map.layer}", fontsize=head_size, labelpad=2)
    words = f"{DOWN} (down), {ACROSS} (across)"
    place = 1 - (page.top + high - 0.17 * scale) / page.height
    page.figure.text(0.5, place, words, size=TICK * scale, ha="center", va="top")
    if shared:
        left = names + side * len(heads) + 0.05
        high = min(len(maps) * side, 3 * scale)
        draw_bar(page, left, title, high, image, colours.range(maps[0], heads[0]))
    return page.figure


def _range_words(layer_map: Map, head: int) -> str:
    """The smallest and the largest value of a head on two lines, or a note if its bias is exactly 0."""
    low, high = layer_map.range(head)
    return ZERO.replace("bias ", "") if head_note(layer_map, head) == ZERO else f"{_short(low)}\n{_short(high)}"


def _short(value: float) -> str:
    """Three significant digits, or all those before the decimal point, with a typographic minus; never −0."""
    text = f"{value:.0f}" if 1000 <= abs(value) < 1e5 else f"{value + 0.0:.3g}"
    return text.replace("-", "−")
