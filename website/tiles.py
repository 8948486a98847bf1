"""The gallery of the encodings: a tile for each with its picture, grouped by where position acts."""

import html
import posixpath

import relpos
from relpos.encodings.registry import FILES
from relpos.forms.cards import Card, grouped


def gallery(folder: str) -> str:
    """The tiles as HTML, for a page in a folder of the site."""
    groups = grouped(relpos.card(name) for name in FILES)
    return "\n\n".join(
        f'### {title}\n\n<div class="gallery">\n{chr(10).join(tile(card, folder) for card in cards)}\n</div>'
        for title, cards in groups.items()
    )


def tile(card: Card, folder: str) -> str:
    """One encoding."""
    page, picture = (
        posixpath.relpath(f"encodings/{path}", folder)
        for path in (f"{card.name}.html", f"pictures/{card.name}-small.png")
    )
    summary = html.escape(card.summary)
    about = f"{card.name}: the map of a head, and three heads by distance"
    image = f'<img src="{picture}" alt="{about}" width="160" height="240" loading="lazy">'
    return f'<a class="tile" href="{page}" title="{summary}">{image}<span>{card.name}</span></a>'
