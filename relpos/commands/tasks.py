"""relpos evaluate RUN --task, and relpos ls --tasks."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from relpos.commands.options import console

LONGEST = 16384
SAMPLES = 100  # sequences at each length by default


def evaluate_task(
    folder: Path,
    task: str,
    lengths: Sequence[int] | None = None,
    samples: int = SAMPLES,
    seed: int = 0,
    out: Path | None = None,
    as_json: bool = False,
) -> dict[str, Any]:
    """Score a run on a task: a table here, the numbers (JSON) and the pictures in `out`, or RUN/evaluation.

    Without lengths: the trained one, twice, four, eight and sixteen times as long, up to 16,384. One JSON file keeps
    all that was scored on a task; the pictures are named by what was asked.
    """
    from relpos.lab.evaluate.file_names import question_stem
    from relpos.lab.runs.run import EVALUATION, open_run
    from relpos.lab.tasks.registry import task as task_of

    task_of(task)  # a wrong name is said before the model is opened
    from relpos.lab.evaluate.task_scoring import score_task
    from relpos.view.figures import save
    from relpos.view.task_figures import draw_accuracy, draw_depths

    run = open_run(folder)
    trained = run.trained_length or LONGEST
    usual = [trained * times for times in (1, 2, 4, 8, 16) if times == 1 or trained * times <= LONGEST]
    lengths = usual if lengths is None else sorted(set(lengths))
    stem = question_stem(
        f"task-{task}",
        lengths=() if lengths == usual else lengths,
        samples=None if samples == SAMPLES else samples,
        seed=seed or None,
    )
    place = run.folder / EVALUATION if out is None else out
    result = score_task(run, task, lengths, samples, seed, place, say=lambda text: typer.echo(text, err=True))
    if all(row["error"] for row in result["rows"]):
        row = result["rows"][0]
        raise ValueError(f"nothing could be measured. {run.folder}, length {row['length']}: {row['error']}")
    written = [place / f"task-{task}.json", save(draw_accuracy([result]), place / f"{stem}.png")]
    if result["depths"]:
        written.append(save(draw_depths(result), place / f"{stem}-depths.png"))
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        _print_result(result)
        typer.echo("\n".join(str(path) for path in written))
    return result


def list_tasks(name: str | None, as_json: bool) -> None:
    """List the tasks, or show one with an example."""
    from rich.table import Table

    from relpos.lab.tasks import names, task

    tasks = [task(one) for one in ([name] if name else names())]
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=name is None)
    if as_json:
        fields = ("name", "summary", "measures", "layout", "paper", "shortest", "chance", "has_depth")
        found = [{field: getattr(one, field) for field in fields} for one in tasks]
        typer.echo(json.dumps(found[0] if name else found, indent=2, ensure_ascii=False))
        return
    if name:
        one = tasks[0]
        rows = {one.name: one.summary, "measures": one.measures, "layout": one.layout, "paper": one.paper}
        rows |= {"words": str(len(one.words)), "shortest": f"{one.shortest} tokens", "chance": f"{one.chance:.1%}"}
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for title, text in {**rows, "example": one.example()}.items():
            table.add_row(title, text)
    else:
        for column in ("name", "what it is", "measures", "paper"):
            table.add_column(column, overflow="fold", no_wrap=column == "name")
        for one in tasks:
            table.add_row(one.name, one.summary, one.measures, one.paper)
    console().print(table, markup=False)


def _print_result(result: dict[str, Any]) -> None:
    from rich.table import Table

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
    console().print(table)
    trained = "* the trained length; " if result["trained_length"] else ""
    typer.echo(f"{result['task']} by {result['encoding']}; {trained}a guess gets {result['chance']:.1%} right.")
