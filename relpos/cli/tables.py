"""Tables that the commands print."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from relpos.runs.results import TaskResult, TextResult


def console() -> "Console":
    """The console that tables are printed to; wide if the output is not a terminal."""
    from rich.console import Console

    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=160)


def print_table(
    head: Sequence[str],
    rows: Sequence[Sequence["str | Text"]],
    *,
    unwrapped: Collection[str] | None = None,
    left: int | None = None,
    title: str | None = None,
    caption: str | None = None,
) -> None:
    """Print a table.

    Args:
        head: The titles of the columns.
        rows: Their cells; [brackets] are not markup.
        unwrapped: Columns that are never wrapped; None for all.
        left: How many columns are aligned to the left; the others are numbers. None for all.
        title: Line above the table.
        caption: Line below it.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left", caption=caption)
    for place, column in enumerate(head):
        number = left is not None and place >= left
        table.add_column(
            column,
            justify="right" if number else "left",
            overflow="fold",
            no_wrap=unwrapped is None or column in unwrapped,
        )
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    console().print(table)


def card_table(rows: Mapping[str, str]) -> None:
    """Print what is known of one thing: titles on the left, texts on the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for title, text in rows.items():
        table.add_row(Text(title), Text(text))
    console().print(table)


def length_mark(length: int, trained: int | None) -> str:
    """A length as a cell, with a star if it is the trained one."""
    return f"{length}{'*' if length == trained else ''}"


def print_results(results: "Mapping[str, TextResult]") -> None:
    """Print the losses of an evaluation on text, and what a reader of the numbers must know."""
    if any("bins" in result for result in results.values()):
        _print_bins(results)
    else:
        _print_rows(results)
    for label, result in results.items():
        for row in result["rows"]:
            if row["error"]:
                typer.echo(f"{label}, length {row['length']}: {row['error']}")
    for sentence in dict.fromkeys(sentence for result in results.values() for sentence in result["warnings"]):
        typer.echo(sentence)


def _print_rows(results: "Mapping[str, TextResult]") -> None:
    metric = " or ".join(dict.fromkeys(result["metric"] for result in results.values()))
    head = ["run", "length", metric, "95 %", "loss", "bits/byte", "windows", "documents", "tokens", "tokens/s"]
    rows = []
    for label, result in results.items():
        for row in result["rows"]:
            if row["error"]:
                rows.append([label, length_mark(row["length"], result["trained_length"]), "–"])
                continue
            low, high, bits = row["low"], row["high"], row["bits_per_byte"]
            rows.append(
                [
                    label,
                    length_mark(row["length"], result["trained_length"]),
                    f"{row['perplexity']:.2f}",
                    "" if low is None else f"{low:.2f} – {high:.2f}",
                    f"{row['loss']:.4f}",
                    "" if bits is None else f"{bits:.4f}",
                    str(row["windows"]),
                    f"1 ({row['blocks']} blocks)" if row["blocks"] else str(row["documents"]),
                    f"{row['tokens']:,}",
                    f"{row['tokens_per_second']:,.0f}",
                    f"{row['peak_memory_bytes'] / 2**20:,.0f} MB",
                ]
            )
    print_table([*head, "memory"], rows, left=1, caption="* the trained length")


def _print_bins(results: "Mapping[str, TextResult]") -> None:
    rows = []
    for label, result in results.items():
        for entry in result["bins"]:
            known = entry["low"] is not None
            rows.append(
                [
                    label,
                    f"{entry['from']} – {entry['to'] - 1}",
                    f"{entry['loss']:.4f}",
                    f"{entry['low']:.4f} – {entry['high']:.4f}" if known else "",
                    f"{entry['control']:.4f}",
                    f"{entry['difference']:+.4f}",
                    f"{entry['difference_low']:+.4f} – {entry['difference_high']:+.4f}" if known else "",
                    f"{entry['tokens']:,}",
                ]
            )
    print_table(["run", "positions", "loss", "95 %", "control", "difference", "95 %", "tokens"], rows, left=1)


def print_scores(results: "Mapping[str, TaskResult]") -> None:
    """Print one table per run: the share of right answers by length."""
    for label, result in results.items():
        rows = []
        for row in result["rows"]:
            if row["error"]:
                rows.append([length_mark(row["length"], result["trained_length"]), "", "", "", "", row["error"]])
            else:
                bounds = f"{row['low']:.1%} – {row['high']:.1%}"
                shares = [f"{row['accuracy']:.1%}", bounds, f"{row['exact']:.1%}"]
                rows.append([length_mark(row["length"], result["trained_length"]), *shares, str(row["samples"]), ""])
        print_table(["length", "answers right", "95 %", "all right", "sequences", ""], rows, unwrapped=(), left=0)
        trained = "* the trained length; " if result["trained_length"] else ""
        guess = f"a guess is right {result['chance']:.1%} of the time."
        typer.echo(f"{label}: {result['task']} with {result['encoding']}; {trained}{guess}")


def print_comparison(out: Path) -> None:
    """Print the perplexities of a comparison by length; the lowest are bold."""
    from rich.text import Text

    from relpos.comparison.comparison import load_comparison
    from relpos.comparison.summary import make_standings, make_table, marking, notes, read_records

    comparison = load_comparison(out)
    records = read_records(comparison, out)
    standings = make_standings(comparison, records)
    marked = {length: at_length.marked for length, at_length in standings.items()}
    head = [f"{length} (trained)" if length == comparison.length else str(length) for length in comparison.lengths]
    rows: list[list[str | Text]] = [
        [
            encoding,
            *(
                Text(str(cell), style="bold" if encoding in marked.get(length, ()) else "")
                for length, cell in row.items()
            ),
        ]
        for encoding, row in make_table(comparison, records).items()
    ]
    print_table(["encoding", *head], rows, left=1, title=f"{comparison.family.metric} by length")
    for note in [*marking(standings), *notes(comparison, records)]:
        typer.echo(note)
