"""The parts of the site that follow from the code: `make docs` puts them into the pages."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import typer.main

from relpos.cli import app
from relpos.encodings.registry import FILES
from relpos.forms.cards import type_text
from relpos.runs.settings import Settings
from relpos.system.options import options_of
from website import benchmarks, cards, faults, tiles


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


def settings_tables() -> str:
    """The settings of a run, one table per section."""
    tables = []
    for section in dataclasses.fields(Settings):
        rows = [f"## {section.name}", "", "| setting | type | default | allowed | meaning |", "|---|---|---|---|---|"]
        for item, about in options_of(section.type):
            allowed = ", ".join(f"`{word}`" for word in about.choices) or (str(about.range) if about.range else "any")
            kind = type_text(item.type).removesuffix(" | None")
            default = "empty" if item.default is dataclasses.MISSING else f"`{item.default!r}`"
            shown = about.shown or ("–" if item.default is None else default)
            meaning = about.meaning.replace("\\", "\\\\")
            rows.append(f"| `{section.name}.{item.name}` | {kind} | {shown} | {allowed} | {meaning} |")
        tables.append("\n".join(rows))
    return "\n\n".join(tables)


def reference() -> str:
    """All commands in Markdown: what each does, its arguments and options."""
    group: Any = typer.main.get_command(app)
    context = group.context_class(group, info_name="relpos")
    return "\n\n".join(command(name, each, context) for name, each in group.commands.items())


def command(name: str, command: Any, parent: Any) -> str:
    """One command."""
    context = command.context_class(command, info_name=name, parent=parent)
    usage = re.sub(r"\[(\[.*?\]).*\]|\{(.*?)\}", r"\1\2", " ".join(command.collect_usage_pieces(context)))
    usage = re.sub(r"(?:\.\.\.)+", "...", usage)
    records = [parameter.get_help_record(context) for parameter in command.params if parameter.name != "help"]
    rows = [f"| `{named(names)}` | {text(meaning)} |" for names, meaning in filter(None, records)]
    about = inspect.cleandoc(command.help or "").replace("\f", "").strip()
    about = re.sub(r"^- (relpos .*)$", r"- `\1`", about, flags=re.MULTILINE)  # examples
    table = "\n".join(["| argument or option | meaning |", "|---|---|", *rows])
    return f"## relpos {name}\n\n`relpos {name} {usage}`\n\n{about}\n\n{table}"


def named(words: str) -> str:
    """`--head INT` for `--head <list[int]>`."""
    words = re.sub(r"<(?:list\[)?(\w+)(?: range)?\]?>", lambda match: match[1].upper(), words)
    return re.sub(r"\s+", " ", words).strip().replace("|", ", ")  # a bar would end the cell


def cell(words: str) -> str:
    """Code in a cell of a table."""
    return re.sub(r"\s+", " ", words).strip().replace("|", "\\|")


def text(words: str) -> str:
    """Words in a cell of a table."""
    words = re.sub(r"\[x>=(\d+)\]", r"At least \1.", cell(words))
    words = re.sub(r"\[(\d+)<=x<=(\d+)\]", r"From \1 to \2.", words)
    for sign in "[]*":  # which Markdown would read as links and emphasis
        words = words.replace(sign, f"\\{sign}")
    return words.replace("<", "&lt;")


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "index.md": ("<!-- gallery -->", lambda: tiles.gallery(".")),
    "encodings/index.md": ("<!-- gallery -->", lambda: tiles.gallery("encodings")),
    "benchmarks.md": ("<!-- tables -->", benchmarks.tables),
    "faults.md": ("<!-- faults -->", faults.overview),
    "reference/settings.md": ("<!-- settings -->", settings_tables),
    "reference/commands.md": ("<!-- commands -->", reference),
}
