"""relpos ls and relpos info: the encodings, and what attention runs on."""

import dataclasses
import json
import re
from typing import Annotated

import typer

from relpos.cli.choices import complete_encoding_or_task
from relpos.cli.options import console
from relpos.encodings.registry import card, names
from relpos.forms.cards import HEAD_DIM, HEADS, Card


def list_encodings(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Show this encoding (with --tasks, this task) in detail, or where position lives in this model: "
            "a folder, a .gguf file or a name on the hub.  [default: list all]",
            autocompletion=complete_encoding_or_task,
        ),
    ] = None,
    tasks: Annotated[bool, typer.Option("--tasks", help="List the tasks of relpos train --task instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table, as in the README.")] = False,
) -> None:
    """List the encodings, or show one with its formula and options, or the positions of a model."""
    if tasks:
        from relpos.cli.tasks import list_tasks

        list_tasks(name, as_json)
        return
    if as_json and markdown:
        raise ValueError("--json and --markdown exclude each other: give only one of them.")
    if name and name not in names():
        from relpos.cli.models import is_model, show_model

        if is_model(name):
            if markdown:
                raise ValueError("--markdown is for encodings: leave it out, or use --json.")
            show_model(name, as_json)
            return
    cards = [card(each) for each in ([name] if name else names())]
    if as_json:
        entries = [dataclasses.asdict(each) for each in cards]
        typer.echo(json.dumps(entries[0] if name else entries, indent=2, ensure_ascii=False))
    elif markdown:
        typer.echo(markdown_table(cards))
    elif name:
        _print_card(cards[0])
    else:
        _print_table(cards)


def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")] = False) -> None:
    """Show the backend, instruction set, threads and versions that attention runs on here."""
    from relpos.attend.backends import describe

    facts = describe()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    native = "native kernel; chunks of torch for biases that read the scores"
    lines = {
        "relpos": facts["relpos"],
        "torch": facts["torch"],
        "on a CPU": f"chunks of torch: {facts['native_missing']}" if facts["native_missing"] else native,
        "threads": facts["threads"],
        "on CUDA": f"FlexAttention, compiled ({facts['cuda_device']})" if facts["cuda_device"] else "no device here",
    }
    if facts["instruction_set"]:
        lines["instruction set"] = (
            f"{facts['instruction_set']} (this CPU supports {', '.join(facts['instruction_sets'])})"
        )
    for title, value in lines.items():
        typer.echo(f"{title:16} {value}")


def markdown_table(cards: list[Card]) -> str:
    """The encodings as a Markdown table, one row per card, with links to the papers."""
    lines = ["| name | place | what it is | learned per head | paper |", "|---|---|---|---:|---|"]
    for each in cards:
        papers = re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[\1](https://arxiv.org/abs/\1)", each.paper)
        cells = (f"`{each.name}`", each.place, each.summary, each.learned, papers)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _print_table(cards: list[Card]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "place", "form", "learned per head", "directions", "paper"):
        table.add_column(column, overflow="fold", no_wrap=column in ("name", "place"))
    for each in cards:
        table.add_row(each.name, each.place, each.form, each.learned, each.directions, each.paper)
    console().print(table, markup=False)  # [brackets] in a formula are not markup


def _print_card(shown: Card) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(shown.name, shown.summary)
    shapes = ", ".join(f"{name} {shape}" for name, shape in shown.parameters.items())
    for title, text in (
        ("formula", shown.formula),
        ("place", shown.place),
        ("form", shown.form),
        ("learned per head", f"{shown.learned} ({HEADS} heads, head_dim {HEAD_DIM}, default options)"),
        ("parameters", shapes or "none"),
        ("directions", shown.directions),
        ("paper", shown.paper),
    ):
        table.add_row(title, text)
    for name, option in shown.options.items():
        table.add_row(f"  {name}={option.default}", f"{option.type}. {option.meaning}")
    console().print(table, markup=False)  # [brackets] in a formula are not markup
