"""What `relpos paper` prints: the list of tables and figures, the cells of one, speeds, and a verdict."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from relpos.cli.tables import print_json, print_table
from relpos.paper.catalogue import SHRUNK_LENGTHS, Cell, Item, book, deviations, item, items
from relpos.paper.paper_options import PaperOptions

if TYPE_CHECKING:
    from relpos.paper.reproduce import Verdict

NINE = items()["table4"].rows
UNKNOWN = "the printed number is not known to us"


def _here(cell: Cell, runs: str | Path) -> bool:
    """Whether a cell has been trained and evaluated here."""
    return (Path(runs) / f"paper-{cell.name}" / "paper.json").exists()


def _needs(shown: Item) -> str:
    """The GPU hours and the data of all cells of a table or figure."""
    if shown.kind == "maps":
        return "minutes of a laptop" if shown.figure else ""
    if shown.kind == "speed":
        return "minutes; a GPU for the paper's sizes"
    hours = [cell.gpu_hours for cell in shown.cells]
    texts = " and ".join(dict.fromkeys(book()["data"][cell.data]["title"] for cell in shown.cells))
    each = f"{min(hours):.2g} to {max(hours):.2g}" if max(hours) > min(hours) else f"{max(hours):.2g}"
    return f"{sum(hours):,.0f} GPU hours ({each} per cell); {texts}"


def print_items(options: PaperOptions) -> None:
    """Print every table and figure: its cells, what it needs, what is here, and the command."""
    if options.json:
        print_json({name: _as_json(shown, options) for name, shown in items().items()})
        return
    rows = []
    for name, shown in items().items():
        done = sum(_here(cell, options.runs) for cell in shown.cells)
        numbers = sum(value is not None for cell in shown.cells for value in cell.printed.values())
        names = "the nine" if len(shown.rows) == len(NINE) else ", ".join(shown.rows)
        cells = f"{len(shown.cells)} ({names})" if shown.cells else ""
        known = f"{numbers} known" if numbers else "none known" if shown.cells else ""
        rows.append([name, shown.title, cells, known, _needs(shown), f"{done}" if shown.cells else "", shown.command])
    head = ["", "shows", "cells", "printed numbers", "needs", "here", "command"]
    print_table(head, rows, unwrapped=["", "printed numbers", "here"])
    typer.echo(
        f"\nThe nine rows: {', '.join(NINE)}.\nA GPU hour is one of an H100 at 40 % of its peak in bfloat16 (6 FLOP "
        "per parameter and token). "
        f"Here: cells that were trained and evaluated in {options.runs}/.\nrelpos paper deviations: where the "
        "printed text, the authors' code and relpos differ, and the options that decide it."
    )


def _as_json(shown: Item, options: PaperOptions) -> dict[str, Any]:
    cells = [
        {**{key: value for key, value in vars(cell).items() if key != "item"}, "gpu_hours": round(cell.gpu_hours, 2)}
        | {"here": _here(cell, options.runs)}
        for cell in shown.cells
    ]
    known = {"title": shown.title, "kind": shown.kind, "needs": _needs(shown), "command": shown.command}
    return {**known, "missing": shown.missing, "cells": cells}


def print_item(name: str, options: PaperOptions) -> None:
    """Print the cells of a table or figure, with the numbers that are printed for them; or all deviations."""
    if name == "deviations":
        _print_deviations(options.json)
        return
    shown = item(name)
    if options.json:
        print_json(_as_json(shown, options))
        return
    typer.echo(f"{name}: {shown.title}\nneeds: {_needs(shown)}\ncommand: {shown.command}")
    for sentence in shown.missing:
        typer.echo(f"note: {sentence}")
    if not shown.cells:
        return
    lengths = shown.cells[0].lengths
    rows = []
    for cell in shown.cells:
        numbers = ["" if cell.printed.get(length) is None else f"{cell.printed[length]:.2f}" for length in lengths]
        here = "yes" if _here(cell, options.runs) else ""
        rows.append([cell.data, cell.size, cell.row, f"{cell.gpu_hours:.2g}", here, *numbers])
    print_table(["text", "size", "row", "GPU hours", "here", *map(str, lengths)], rows, left=3)
    for source in dict.fromkeys(cell.source for cell in shown.cells if cell.source):
        typer.echo(f"source: {book()['sources'][source]}")
    if any(length not in cell.printed for cell in shown.cells for length in lengths):
        typer.echo(f"An empty cell: {UNKNOWN}, or the paper has none.")


def _print_deviations(as_json: bool) -> None:
    known = deviations()
    if as_json:
        print_json([vars(deviation) for deviation in known])
        return
    rows = [[each.name, each.printed, each.code, each.relpos, each.recipe, ", ".join(each.keys)] for each in known]
    print_table(["", "printed", "authors' code", "relpos by default", "recipe", "settings"], rows, unwrapped=[""])


def print_verdict(verdict: "Verdict") -> None:
    """Print a verdict: the numbers beside each other, and the settings that differ."""
    typer.echo(f"{verdict.run}: {verdict.cell}")
    rows = []
    for number in verdict.numbers:
        cells = ["–" if value is None else f"{value:.2f}" for value in (number.printed, number.measured)]
        rows.append([str(number.length), *cells, "" if number.relative is None else f"{number.relative:+.2%}"])
    if rows:
        print_table(["length", "printed", "measured", "difference"], rows, left=0)
    if verdict.source:
        typer.echo(f"source: {book()['sources'][verdict.source]}")
    else:
        typer.echo(f"{UNKNOWN}: the settings alone are compared.")
    changed = [difference for difference in verdict.differences if not difference.rounding]
    for title, some in (
        ("settings that differ from the recipe", changed),
        ("settings that change rounding only", [each for each in verdict.differences if each.rounding]),
    ):
        if some:
            typer.echo(f"{title}:")
            for difference in some:
                typer.echo(f"  {difference}")
    typer.echo(verdict.sentence)


def print_speeds(name: str, options: PaperOptions) -> None:
    """Measure and print the speed of every row, or of one, as soon as it is known."""
    from relpos.model_catalogue import preset
    from relpos.paper.speed import measure

    shown = item(name)
    cells = [cell for cell in shown.cells if options.row in (None, cell.row)]
    if not cells:
        shown.cell(options.row, None, None)  # which refuses the name
    size, small = options.size or "medium", options.shrink
    preset(size)
    length, batch, generated = (64, 1, 16) if small else (1024, 4, 512)
    lengths: Sequence[int] = options.lengths or [length]
    typer.echo(
        f"{'nano' if small else size}, windows of {lengths[0]} tokens × {batch}; generating 4 sequences up to "
        f"{generated} tokens without a cache. The printed numbers are not known to us."
    )
    rows, results = [], []
    for cell in cells:
        settings = {**cell.settings, "model.preset": "nano" if small else size}
        speed = measure(Cell(**{**vars(cell), "settings": settings}), lengths[0], batch, generated, 1 if small else 3)
        results.append(speed)
        rows.append(
            [
                cell.row,
                f"{speed['training_tokens_per_second']:,.0f}",
                f"{speed['training_bytes'] / 2**30:.2f}",
                f"{speed['generated_tokens_per_second']:,.0f}",
                f"{speed['generation_bytes'] / 2**30:.2f}",
            ]
        )
        typer.echo(f"{cell.row}: {rows[-1][1]} tokens/s in training", err=True)
    if options.json:
        print_json(results)
        return
    print_table(["row", "training tokens/s", "GB", "generated tokens/s", "GB "], rows, left=1)


def print_smoke(options: PaperOptions) -> None:
    """Run every recipe, shrunk, from its start to a table; say what each stands for and how long it took."""
    if not options.shrink:
        raise ValueError("all tables at full size are weeks of a GPU: give one, or add --shrink.")
    from relpos.paper.reproduce import distinct_recipes, run_cell, verify

    began, rows = time.monotonic(), []
    recipes = list(distinct_recipes())
    for number, (cell, names) in enumerate(recipes, start=1):
        start = time.monotonic()
        given = dataclasses.replace(options, row=cell.row, size=cell.size, on=cell.data, say=lambda text: None)
        folder = run_cell(given, cell.item)
        verdict = verify(folder)
        numbers = [
            "–" if each.measured is None else f"{each.measured:.0f}" for each in verdict.numbers if not each.printed
        ]
        changed = sum(not difference.rounding for difference in verdict.differences)
        seconds = time.monotonic() - start
        rows.append([cell.item, cell.row, str(len(names)), ", ".join(numbers), str(changed), f"{seconds:.0f}"])
        options.say(f"{number} of {len(recipes)}: {cell.item}, {cell.row}, for {len(names)} cells: {seconds:.0f} s")
    head = ["recipe", "row", "cells", f"perplexity at {', '.join(map(str, SHRUNK_LENGTHS))}", "settings changed", "s"]
    print_table(head, rows, left=2)
    cells = sum(int(row[2]) for row in rows)
    typer.echo(f"{len(rows)} recipes, for {cells} cells, from start to table in {time.monotonic() - began:.0f} s.")
