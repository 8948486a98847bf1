"""The parts of the site that follow from the code: `make docs` puts them into the pages."""

from collections.abc import Callable

import relpos
from relpos.encodings.registry import FILES
from website import cards, command_line, settings_table
from website.repository import ROOT

ENCODINGS = ROOT / "docs" / "encodings"
PLACES = {  # sections of the overview
    "score": "On the scores: an additive bias",
    "query and key": "On queries and keys",
    "embedding": "On the embedding",
    "nowhere": "Nowhere",
}


def complete(path: str, markdown: str) -> str:
    """A page of the site with its generated parts.

    Args:
        path: The page's path below docs/.
        markdown: The page as it is written by hand.
    """
    for name in FILES:
        if path == f"encodings/{name}.md":
            return cards.page(name, markdown)
    if path in PARTS:
        comment, part = PARTS[path]
        assert comment in markdown, f"{path} has no place for its generated part, {comment}"
        markdown = markdown.replace(comment, part())
    return markdown


def overview() -> str:
    """A list of all encodings by place."""
    sections = []
    for place, title in PLACES.items():
        names = [name for name in FILES if relpos.card(name).place == place]
        rows = [f"| [{name}]({name}.md) | {relpos.card(name).summary} |" for name in names]
        if rows:
            sections.append("\n".join([f"## {title}", "", "| name | what it is |", "|---|---|", *rows]))
    return "\n\n".join(sections)


def unwritten() -> list[str]:
    """Names of the encodings whose page nobody has written by hand."""
    return [name for name in FILES if not (ENCODINGS / f"{name}.md").exists()]


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "encodings/index.md": ("<!-- list -->", overview),
    "reference/settings.md": ("<!-- settings -->", settings_table.tables),
    "reference/commands.md": ("<!-- commands -->", command_line.reference),
}
