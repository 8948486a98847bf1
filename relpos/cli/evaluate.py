"""relpos evaluate."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from relpos.cli import cluster
from relpos.cli.choices import (
    complete_protocol,
    complete_rope_scalings,
    complete_split,
    complete_task,
    metavar,
)
from relpos.cli.options import check_seed, console, default, parse_lengths, parse_names
from relpos.cli.tasks import print_scores
from relpos.evaluation import defaults
from relpos.evaluation.defaults import EVAL_TOKENS, ProtocolName, SplitName

if TYPE_CHECKING:
    from rich.table import Table

Result = dict[str, Any]
TEXT, TASK, OUTPUT = "Text", "Task", "Output"  # groups of options in the help


def evaluate(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Trained models: folders, .gguf files or hub names.")
    ],
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Lengths in tokens, separated by commas.  "
            f"{default(', '.join(map(str, defaults.MULTIPLES)) + ' × the trained length')}",
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help=f"Seed of the bootstrap resamples; with --task, of the sequences.  {default(defaults.SEED)}",
            callback=check_seed,
            show_default=False,
        ),
    ] = defaults.SEED,
    protocol: Annotated[
        str,
        typer.Option(
            metavar=metavar(defaults.PROTOCOLS),
            help="Which tokens are scored, and with how much context: docs/evaluation.md.  "
            f"{default(defaults.PROTOCOL)}",
            show_default=False,
            autocompletion=complete_protocol,
            rich_help_panel=TEXT,
        ),
    ] = defaults.PROTOCOL,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help=f"Text to score: sotu, a file, a folder, or a hub name.  {default('the data of the run')}",
            rich_help_panel=TEXT,
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar=metavar(defaults.SPLITS),
            help="heldout: the part that training leaves out. all: every document.  "
            f"{default('heldout for the data of the run, all for other data')}",
            autocompletion=complete_split,
            rich_help_panel=TEXT,
        ),
    ] = None,
    eval_tokens: Annotated[
        int | None,
        typer.Option(
            help="Score at most this many tokens at each length, spread over the text.  "
            f"{default(', '.join(f'{name}: {tokens:,}' for name, tokens in EVAL_TOKENS.items()))}",
            min=1,
            rich_help_panel=TEXT,
        ),
    ] = None,
    last: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens at the end of each window that the protocol last scores.  {default(defaults.LAST)}",
            min=1,
            rich_help_panel=TEXT,
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            help="Tokens by which windows move, for the protocols sliding and positions.  "
            f"{default('sliding: half the length, positions: a quarter of the trained length')}",
            min=1,
            rich_help_panel=TEXT,
        ),
    ] = None,
    rope_scaling: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...",
            help="RoPE scalings to apply without training, with a factor if wanted: "
            f"{', '.join(defaults.ROPE_SCALINGS)}, yarn:4.",
            autocompletion=complete_rope_scalings,
            rich_help_panel=TEXT,
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Score answers to this synthetic task instead of text. The runs must have been trained on it.",
            autocompletion=complete_task,
            rich_help_panel=TASK,
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            help=f"Sequences of the task at each length.  {default(defaults.SAMPLES)}",
            min=1,
            show_default=False,
            rich_help_panel=TASK,
        ),
    ] = defaults.SAMPLES,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder to write to; each run gets a folder in it.  "
            f"{default('RUN/evaluation, and evaluation for the curve of several runs')}",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    bos: Annotated[
        bool,
        typer.Option(
            "--bos/--no-bos",
            help="Whether models that others trained see their special tokens, BOS or CLS and SEP, around each window: "
            f"docs/evaluation.md.  {default('--bos')}",
            show_default=False,
            rich_help_panel=TEXT,
        ),
    ] = True,
    context_parallel: Annotated[
        bool,
        typer.Option(
            "--context-parallel",
            help="Divide every window among the processes of a launch by torchrun: docs/scale.md.",
            rich_help_panel=TEXT,
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of the table.", rich_help_panel=OUTPUT)
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
    """Evaluate trained models at lengths that they were not trained on.

    Prints perplexity (of a model that predicts masked tokens, pseudo-perplexity) and bits per byte with 95 % intervals,
    or with --task the share of right answers. Writes the numbers (JSON) and the curve (PNG) next to the model. If
    interrupted, rerun the command to resume. Many runs and lengths can be divided into parts, which run on this
    machine, on a Ray cluster or on SLURM: docs/scale.md.

    - relpos evaluate runs/cable
    - relpos evaluate runs/cable runs/rope --lengths 512,2048,8192 --out runs/both
    - relpos evaluate runs/cable --data wiki.test.raw --protocol last
    - relpos evaluate runs/rope --rope-scaling ntk,yarn:4
    - relpos evaluate runs/recall-rope --task recall --lengths 64,256,1024
    - relpos evaluate runs/cable runs/rope --workers 2
    - torchrun --nproc-per-node 4 -m relpos.cli evaluate runs/cable --lengths 65536 --context-parallel
    """
    wanted = None if lengths is None else parse_lengths(lengths)
    scalings = parse_names("--rope-scaling", rope_scaling)
    where = cluster.make_executor(
        workers, cores, memory, gpus, ray, slurm, slurm_partition, slurm_minutes, slurm_option
    )

    from relpos.evaluation.api import evaluate as evaluate_runs

    with where or contextlib.nullcontext() as executor:
        evaluation = evaluate_runs(
            runs,
            lengths=wanted,
            protocol=cast(ProtocolName, protocol),  # an unknown name is refused there, with the nearest known one
            data=data,
            split=cast(SplitName | None, split),
            stride=stride,
            last=last,
            eval_tokens=eval_tokens,
            rope_scaling=scalings,
            task=task,
            samples=samples,
            out=out,
            seed=seed,
            context_parallel=context_parallel,
            bos=bos,
            executor=executor,
        )
    if context_parallel and int(os.environ.get("RANK", "0")):
        return  # the first process prints
    results = evaluation.results
    if as_json:
        typer.echo(json.dumps(list(results.values()) if len(results) > 1 else next(iter(results.values())), indent=1))
        return
    if task is not None:
        print_scores(results)
    else:
        table = _bins(results) if protocol == "positions" else _rows(results)
        console().print(table, markup=False)  # [brackets] in a name are not markup
        _print_sentences(results)
    files = evaluation.pictures if task is None else [*evaluation.files, *evaluation.pictures]
    typer.echo("\n".join(map(str, files)))


def _print_sentences(results: Mapping[str, Result]) -> None:
    """Print why a length could not be measured, and what a reader of the numbers must know."""
    for label, result in results.items():
        for row in result["rows"]:
            if row["error"]:
                typer.echo(f"{label}, length {row['length']}: {row['error']}")
    for sentence in dict.fromkeys(sentence for result in results.values() for sentence in result["warnings"]):
        typer.echo(sentence)


def _rows(results: Mapping[str, Result]) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", no_wrap=True)
    metric = " or ".join(dict.fromkeys(result["metric"] for result in results.values()))
    columns = ["length", metric, "95 %", "loss", "bits/byte", "windows", "documents", "tokens", "tokens/s"]
    for column in (*columns, "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    for label, result in results.items():
        for row in result["rows"]:
            mark = " *" if row["length"] == result["trained_length"] else ""
            if row["error"]:
                table.add_row(label, f"{row['length']}{mark}", "–")
                continue
            low, high, bits = row["low"], row["high"], row["bits_per_byte"]
            table.add_row(
                label,
                f"{row['length']}{mark}",
                f"{row['perplexity']:.2f}",
                "" if low is None else f"{low:.2f} – {high:.2f}",
                f"{row['loss']:.4f}",
                "" if bits is None else f"{bits:.4f}",
                str(row["windows"]),
                f"1 ({row['blocks']} blocks)" if row["blocks"] else str(row["documents"]),
                f"{row['tokens']:,}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['peak_memory_bytes'] / 2**20:,.0f} MB",
            )
    table.caption = "* the trained length"
    return table


def _bins(results: Mapping[str, Result]) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", no_wrap=True)
    for column in ("positions", "loss", "95 %", "control", "difference", "95 %", "tokens"):
        table.add_column(column, justify="right", no_wrap=True)
    for label, result in results.items():
        for entry in result["bins"]:
            known = entry["low"] is not None
            table.add_row(
                label,
                f"{entry['from']} – {entry['to'] - 1}",
                f"{entry['loss']:.4f}",
                f"{entry['low']:.4f} – {entry['high']:.4f}" if known else "",
                f"{entry['control']:.4f}",
                f"{entry['difference']:+.4f}",
                f"{entry['difference_low']:+.4f} – {entry['difference_high']:+.4f}" if known else "",
                f"{entry['tokens']:,}",
            )
    return table
