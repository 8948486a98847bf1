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
    usage = " ".join(command.collect_usage_pieces(context))
    records = [parameter.get_help_record(context) for parameter in command.params if parameter.name != "help"]
    rows = [f"| `{cell(named(names))}` | {text(meaning)} |" for names, meaning in filter(None, records)]
    about = inspect.cleandoc(command.help or "").replace("\f", "").strip()
    about = re.sub(r"^- (relpos .*)$", r"- `\1`", about, flags=re.MULTILINE)  # examples
    table = "\n".join(["| argument or option | meaning |", "|---|---|", *rows])
    return f"## relpos {name}\n\n`relpos {name} {usage}`\n\n{about}\n\n{table}"


def named(words: str) -> str:
    """`--head INT` for `--head <list[int]>`."""
    return re.sub(r"<(?:list\[)?(\w+)(?: range)?\]?>", lambda match: match[1].upper(), words)


def cell(words: str) -> str:
    """Code in a cell of a table."""
    return re.sub(r"\s+", " ", words).strip().replace("|", "\\|")


def text(words: str) -> str:
    """Words in a cell of a table."""
    return cell(words).replace("<", "&lt;").replace("*", "\\*")
