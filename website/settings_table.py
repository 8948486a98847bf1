"""The table of settings, from the fields of relpos/runs/settings.py."""

import dataclasses
from typing import Any

from relpos.runs.settings import Settings
from relpos.system.options import options_of


def tables() -> str:
    """One table per group, in Markdown."""
    return "\n\n".join(table(section.name, section.type) for section in dataclasses.fields(Settings))


def table(group: str, cls: Any) -> str:
    """The settings of one group: name, type, default, allowed values, meaning."""
    rows = [f"## {group}", "", "| setting | type | default | allowed | meaning |", "|---|---|---|---|---|"]
    for each, about in options_of(cls):
        allowed = ", ".join(f"`{word}`" for word in about.choices) or (str(about.range) if about.range else "any")
        cells = (kind_text(each.type), default_text(each, about.shown), allowed, about.meaning.replace("\\", "\\\\"))
        rows.append(f"| `{group}.{each.name}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def kind_text(hint: Any) -> str:
    """A type as people read it."""
    plain = isinstance(hint, type) and not hasattr(hint, "__args__")
    return (hint.__name__ if plain else str(hint)).replace("typing.", "").replace(" | None", "")


def default_text(each: "dataclasses.Field[Any]", shown: str) -> str:
    """A default as people read it."""
    if shown:
        return shown
    if each.default is dataclasses.MISSING:
        return "empty"
    return "–" if each.default is None else f"`{each.default!r}`"
