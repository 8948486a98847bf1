"""relpos ls --tasks, and the tables of relpos evaluate --task."""

import json
from collections.abc import Mapping
from typing import Any

import typer

from relpos.cli.options import console


def list_tasks(name: str | None, as_json: bool) -> None:
    """List the tasks, or show one with an example."""
    from rich.table import Table

    from relpos.tasks import names, task

    tasks = [task(each) for each in ([name] if name else names())]
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=name is None)
    if as_json:
        fields = ("name", "summary", "measures", "layout", "paper", "shortest", "chance", "has_depth")
        cards = [{field: getattr(each, field) for field in fields} for each in tasks]
        typer.echo(json.dumps(cards[0] if name else cards, indent=2, ensure_ascii=False))
        return
    if name:
        shown = tasks[0]
        rows = {shown.name: shown.summary, "measures": shown.measures, "layout": shown.layout, "paper": shown.paper}
        rows |= {"words": str(len(shown.words)), "shortest": f"{shown.shortest} tokens"}
        rows |= {"chance": f"{shown.chance:.1%}"}
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for title, text in {**rows, "example": shown.example()}.items():
            table.add_row(title, text)
    else:
        for column in ("name", "what it is", "measures", "paper"):
            table.add_column(column, overflow="fold", no_wrap=column == "name")
        for each in tasks:
            table.add_row(each.name, each.summary, each.measures, each.paper)
    console().print(table, markup=False)


def print_scores(results: Mapping[str, dict[str, Any]]) -> None:
    """Print one table per run: the share of right answers by length."""
    from rich.table import Table

    for label, result in results.items():
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("length", "answers right", "95 %", "all right", "sequences"):
            table.add_column(column, justify="right")
        table.add_column("", overflow="fold")
        for row in result["rows"]:
            length = f"{row['length']}{'*' if row['length'] == result['trained_length'] else ''}"
            if row["error"]:
                table.add_row(length, "", "", "", "", row["error"])
            else:
                bounds = f"{row['low']:.1%} – {row['high']:.1%}"
                table.add_row(length, f"{row['accuracy']:.1%}", bounds, f"{row['exact']:.1%}", str(row["samples"]))
        console().print(table, markup=False)
        trained = "* the trained length; " if result["trained_length"] else ""
        guess = f"a guess is right {result['chance']:.1%} of the time."
        typer.echo(f"{label}: {result['task']} with {result['encoding']}; {trained}{guess}")
