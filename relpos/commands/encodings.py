"""relpos ls and relpos info: what there is, and what it runs on."""

import dataclasses
import json
from typing import Annotated

import typer

from relpos.commands.choices import complete_encoding
from relpos.commands.options import console
from relpos.encodings.registry import Card, card, names


def list_encodings(
    name: Annotated[
        str | None,
        typer.Argument(help="Show this encoding in detail. Default: list all.", autocompletion=complete_encoding),
    ] = None,
    tasks: Annotated[bool, typer.Option("--tasks", help="List the tasks of relpos train --task instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")] = False,
) -> None:
    """List the encodings, or show one with its formula and options."""
    if tasks:
        from relpos.commands.tasks import list_tasks

        list_tasks(name, as_json)
        return
    cards = [card(one) for one in ([name] if name else names())]
    if as_json:
        found = [dataclasses.asdict(one) for one in cards]
        typer.echo(json.dumps(found[0] if name else found, indent=2, ensure_ascii=False))
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


def _print_table(cards: list[Card]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "enters at", "form", "learned per head", "directions", "paper"):
        table.add_column(column, overflow="fold", no_wrap=column in ("name", "enters at"))
    for one in cards:
        table.add_row(one.name, one.place, one.form, one.learns_by_default, one.directions, one.paper)
    console().print(table, markup=False)  # a formula's [brackets] are no style


def _print_card(one: Card) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(one.name, one.summary)
    for title, text in (
        ("formula", one.formula),
        ("enters at", one.place),
        ("form", one.form),
        ("learned per head", one.learns),
        ("directions", one.directions),
        ("paper", one.paper),
    ):
        table.add_row(title, text)
    for option, (default, meaning) in one.options.items():
        table.add_row(f"  {option}={default}", meaning)
    console().print(table, markup=False)  # a formula's [brackets] are no style
