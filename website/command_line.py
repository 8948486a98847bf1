"""The reference of the command line, from the commands' own help."""

import inspect
import re
from typing import Any

import typer.main

from relpos.cli import app


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
