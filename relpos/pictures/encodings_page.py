"""All encodings on one page, untrained: a small map and a profile of each, grouped by where position acts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from relpos.encodings.registry import card, names
from relpos.forms.cards import Card, grouped
from relpos.maps.layer import Quantity
from relpos.maps.map import ColourScale, Map, map_of_layer
from relpos.maps.subject import EncodingSubject, Request, View, three_heads
from relpos.pictures.draw_options import COLUMNS, WIDTHS, DrawOptions
from relpos.pictures.map_figures import draw_map
from relpos.pictures.picture import Arrays, Picture, map_arrays, map_numbers
from relpos.pictures.printed_page import NAME, TITLE, Look, Page, text_width
from relpos.pictures.profile_figures import PALETTE

LENGTH = 256  # tokens
CELLS = 128  # per side of a map
BESIDE = 8  # encodings beside each other
CAPTION = (
    "All encodings, untrained, over {length:,} tokens, grouped by where position acts. Above, the map of head {head}: "
    "rows are queries, columns are keys, light is high. Below, the bias or score against the distance in heads {heads}."
)
CONSTANT = "A map of one colour is constant before training, or at this length"


@dataclass(frozen=True)
class GalleryEntry:
    """An encoding in the gallery."""

    card: Card
    view: View
    layer_map: Map

    @property
    def heads(self) -> list[int]:
        """The heads of its profile; the second one has the map."""
        return three_heads(self.layer_map.heads)


def gallery_entry(name: str, length: int = LENGTH, seed: int = 0) -> GalleryEntry:
    """An encoding with its start values: its bias, or the scores of equal tokens if it adds none."""
    view = EncodingSubject(name).view(Request(length=length, seed=seed))
    kind: Quantity = "bias" if view.layers[0].form is not None and view.place == "score" else "scores"
    return GalleryEntry(card(name), view, map_of_layer(view.layers[0], kind, None, CELLS))


def gallery_picture(options: DrawOptions) -> Picture:
    """Draw the page of all encodings."""
    length, entries = options.length or LENGTH, {}
    for place, name in enumerate(names()):
        entries[name] = gallery_entry(name, length, options.seed)
        options.progress((place + 1) / (len(names()) + 1))
    heads = three_heads(next(iter(entries.values())).layer_map.heads)
    words = ", ".join(str(head + 1) for head in heads[:-1]) + f" and {heads[-1] + 1}"
    caption = options.title + CAPTION.format(length=length, head=heads[1] + 1, heads=words)
    constant = [name for name, entry in entries.items() if _is_constant(entry)]
    caption += f" {CONSTANT}: {', '.join(constant)}." if constant else ""
    look = Look(caption=caption, captioned=options.caption, width=options.width or WIDTHS[COLUMNS])
    figure = draw_gallery(entries, look)
    options.progress(1.0)
    arrays, maps, numbers = Arrays(), [], []
    for name, entry in entries.items():
        arrays |= map_arrays([entry.layer_map], name)
        maps.append(entry.layer_map)
        numbers.append({"group": entry.card.group, **map_numbers(entry.view, [entry.layer_map], {}, options.seed)})
    return Picture(figure, maps, caption, {"encodings": numbers}, arrays)


def _is_constant(entry: GalleryEntry) -> bool:
    low, high = entry.layer_map.range(entry.heads[1])
    return high - low < 1e-6 * max(abs(low), abs(high), 1e-6)


def draw_gallery(entries: Mapping[str, GalleryEntry], look: Look) -> Figure:
    """Draw each group below its title, small groups beside each other."""
    scale = look.scale
    places, rows = _places(grouped(entry.card for entry in entries.values()))
    across = look.width / BESIDE
    side, title, name = 0.86 * across, 0.26 * scale, 0.17 * scale
    down = title + name + 1.52 * side + 0.14 * scale
    page = Page(look.width, rows * down, scale, look.caption if look.captioned else "", look.banner)
    fits = [min(len(cells), BESIDE) * across / (1.2 * text_width(group, 1.0)) for group, cells in places.items()]
    heading = min(TITLE * scale, *fits)
    for group, cells in places.items():
        row, column, _ = cells[0]
        height = page.height_at(row * down + 0.05 * scale)
        left = (column + 0.07) * across
        page.figure.text(left / page.width, height, group, size=heading, weight="bold", va="top")
        for row, column, encoding in cells:
            left, top = (column + 0.07) * across, row * down + title + name
            axes = [page.put(left, top, side, side), page.put(left, top + 1.05 * side, side, 0.45 * side)]
            draw_thumbnail(axes, entries[encoding], scale)
            size = min(NAME * scale, across / text_width(f"{encoding}  ", 1.0))
            axes[0].set_title(encoding, fontsize=size, pad=3 * scale)
    return page.figure


def _places(groups: Mapping[str, Sequence[Card]]) -> tuple[dict[str, list[tuple[int, int, str]]], int]:
    """Row, column and name of every encoding by group, and the number of rows; a group that fits continues a row."""
    row, column, places = 0, 0, {}
    for group, cards in groups.items():
        if column and column + len(cards) > BESIDE:
            row, column = row + 1, 0
        cells = [divmod(row * BESIDE + column + place, BESIDE) for place in range(len(cards))]
        places[group] = [(*cell, of_group.name) for cell, of_group in zip(cells, cards, strict=True)]
        row, column = divmod(cells[-1][0] * BESIDE + cells[-1][1] + 1, BESIDE)
    return places, row + (column > 0)


def draw_thumbnail(axes: Sequence[Axes], entry: GalleryEntry, size: float) -> None:
    """Draw the map of one head, in the colours of one sign in every gallery, above the profiles of three heads."""
    above, below = axes
    head = entry.heads[1]
    scale = ColourScale.of(*entry.layer_map.range(head), False, entry.layer_map.typical_range(head))
    draw_map(above, entry.layer_map, head, scale)
    for head, colour in zip(entry.heads, PALETTE, strict=False):
        below.plot(entry.layer_map.distances, entry.layer_map.profile[1, head], color=colour, linewidth=0.9 * size)
    below.margins(x=0, y=0.08)
    if _is_constant(entry):  # drawn in the middle
        low, high = entry.layer_map.range(entry.heads[1])
        below.set_ylim(low - 1, high + 1)
    for panel in axes:
        panel.set(xticks=[], yticks=[])


def thumbnail_figure(name: str, width: float = 1.6) -> Figure:
    """A figure of one encoding alone, as it is in the gallery, without text."""
    entry = gallery_entry(name)
    page = Page(width, 1.5 * width - 0.08, 1.0, "")
    axes = [page.put(0.04, 0.04, width - 0.08, width - 0.08), page.put(0.04, width + 0.04, width - 0.08, 0.4 * width)]
    draw_thumbnail(axes, entry, 1.0)
    return page.figure
