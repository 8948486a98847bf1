"""The commands that work: draw, figures, explore, train, evaluate, compare. Their options are those of Python."""

import contextlib
import json
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import typer

from relpos.cli.cluster import ClusterOptions, make_executor
from relpos.cli.from_options import command
from relpos.cli.tables import print_comparison, print_results, print_scores
from relpos.comparison.options import CompareOptions
from relpos.evaluation.options import OUTPUT, EvaluateOptions
from relpos.explorer.options import ExploreOptions
from relpos.paper.options import FigureOptions
from relpos.pictures.options import COLUMNS, LOOKS, SHOWN, DrawOptions
from relpos.system.options import Range, option
from relpos.training.train import TrainOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relpos.runs.results import TaskResult, TextResult

Values = dict[str, Any]  # the options that were given, by name


@command(TrainOptions)
def train(options: Values) -> None:
    """Train a model with a positional encoding. If interrupted, rerun the command to resume.

    With no options, it trains a small GPT-2 that a laptop finishes in minutes.

    - relpos train --encoding cable --length 512 --minutes 5 --out runs/cable
    - relpos train --encoding rope --option scaling=yarn --option factor=4 --steps 1000
    - relpos train --data my/texts --preset small --batch-size 16 --lr 6e-4
    - relpos train --task recall --encoding rope --out runs/recall-rope
    - relpos train --family bert --encoding alibi --steps 300
    - relpos train --from my/llama --encoding kerple_log --length 1024 --batch-size 1 --steps 200
    - relpos train --config paper-small --encoding fire optimizer.weight_decay=0
    """
    settings = TrainOptions(**options).settings()

    from relpos.training.training import train as train_model

    train_model(settings)


@dataclass(frozen=True, kw_only=True)
class EvaluateOutput:
    """What only the command `relpos evaluate` has."""

    json: bool = option(False, "Print JSON instead of the table.", panel=OUTPUT)


@command(EvaluateOptions, EvaluateOutput, ClusterOptions)
def evaluate(options: Values, output: Values, cluster: Values) -> None:
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
    where = make_executor(ClusterOptions(**cluster))

    from relpos.evaluation.evaluate import evaluate as evaluate_runs

    with where or contextlib.nullcontext() as executor:
        evaluation = evaluate_runs(**options, executor=executor)
    if "context_parallel" in options and int(os.environ.get("RANK", "0")):
        return  # the first process prints
    results = evaluation.results
    if output:
        typer.echo(json.dumps(list(results.values()) if len(results) > 1 else next(iter(results.values())), indent=1))
    elif "task" in options:
        print_scores(cast("Mapping[str, TaskResult]", results))
        typer.echo("\n".join(map(str, [*evaluation.files, *evaluation.pictures])))
    else:
        print_results(cast("Mapping[str, TextResult]", results))
        typer.echo("\n".join(map(str, evaluation.pictures)))


@command(CompareOptions, ClusterOptions)
def compare(options: Values, cluster: Values) -> None:
    """Train and evaluate several encodings under equal conditions, and write one report.

    If interrupted, rerun the command to resume: finished trials are kept, failed trials are run once more. Trials run
    on this machine, on a Ray cluster or on SLURM: docs/scale.md. A later command may add encodings, seeds and lengths;
    options that are left out keep the value stored in the folder.

    - relpos compare --encodings alibi,kerple_log,rope --seeds 3 --steps 1200 --out runs/three
    - relpos compare --out runs/three --encodings cable --workers 2
    - relpos compare --out runs/three --ray 10.0.0.1:6379 --cores 4 --gpus 1
    - relpos compare --out runs/three --report-only
    """
    where = make_executor(ClusterOptions(**cluster), default_workers=1)

    from relpos.comparison.compare import compare as compare_encodings

    with where or contextlib.nullcontext() as executor:
        words = shlex.join(["relpos", *sys.argv[1:]])
        report = compare_encodings(**options, executor=executor, command=words, say=typer.echo)
    print_comparison(report.html.parent)
    typer.echo(f"{report.html}\n{report.markdown}")
    if report.failed:
        raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class DrawOutput:
    """What only the command `relpos draw` has."""

    out: str | None = option(
        None,
        "A .png, .pdf or .svg file; or a .json, .npz or .safetensors file for the numbers alone.",
        shown="WHAT.png",
        metavar="FILE",
    )
    numbers: str | None = option(
        None,
        "Also write the numbers behind the picture: every array to a .npz or .safetensors file, or the small ones to a "
        ".json file (docs/figures.md).",
        metavar="FILE",
    )
    text_file: str | None = option(None, "File with text for the model to read.", metavar="FILE", panel=SHOWN)
    columns: int = option(
        COLUMNS, "Width in columns of a printed page: 1 or 2; or give --width.", range=Range(1, 2), panel=LOOKS
    )


@command(DrawOptions, DrawOutput)
def draw(options: Values, output: Values) -> None:
    """Draw what an encoding does: one heat map per head, untrained or of a trained model.

    - relpos draw alibi
    - relpos draw runs/cable --text "To be, or not to be" --label-tokens
    - relpos draw runs/cable --layer all --shared-scale
    - relpos draw kerple_log --show profile --columns 1 --out kerple.pdf
    - relpos draw kerple_log fire t5 --show profile --log --head 1
    - relpos draw runs/cable --layer all --show mass
    - relpos draw runs/cable --show weights --numbers weights.npz
    """
    from relpos.pictures.draw import draw as draw_picture
    from relpos.pictures.picture import check_files
    from relpos.pictures.printed_page import WIDTHS

    files = DrawOutput(**output)
    what = options.pop("what")
    path = Path(files.out or f"{'-'.join(Path(each).resolve().name for each in what)}.png")
    numbers = None if files.numbers is None else Path(files.numbers)
    check_files(path, numbers)  # before the work, not after it
    if files.text_file is not None:
        if "text" in options:
            raise ValueError("give --text or --text-file, not both.")
        options |= {"text": _read_text(files.text_file), "text_name": files.text_file}
    options.setdefault("width", WIDTHS[files.columns])
    picture = draw_picture(what if len(what) > 1 else what[0], **options, progress=Progress("drawing"))
    typer.echo(f"{picture.save(path)}: {picture.caption}")
    if numbers is not None:
        typer.echo(f"{picture.save(numbers)}: the numbers behind it")


@command(FigureOptions)
def figures(options: Values) -> None:
    """Make the figures of the CABLE paper: train the missing models, draw, and put all on one page (index.html).

    Figure 12 (ALiBi) needs no training and is ready within seconds.

    The others: 8 CABLE, 10 Kerple, 13 FIRE, 14 T5-bias (clipped), 15 RoPE.

    The models are kept in RUNS/figures-ENCODING-PRESET.
    """
    from relpos.paper.figures import draw_figures

    failed = draw_figures(**options, say=typer.echo)
    if failed:
        raise ValueError(
            f"{len(failed)} of the figures could not be made (see above); the others are in "
            f"{FigureOptions(**options).out}."
        )


SERVER = "The server"  # group in the help


@dataclass(frozen=True, kw_only=True)
class ExploreOutput:
    """What only the command `relpos explore` has."""

    text: str | None = option(None, "File with text for the models to read.", shown="held-out text", metavar="FILE")
    export: str | None = option(
        None, "Write one self-contained .html file instead, which needs no server.", metavar="FILE"
    )
    port: int | None = option(
        None,
        "Port; the next free one if it is taken.",
        shown="8123",
        range=Range(0, 65535),
        panel=SERVER,
    )
    host: str = option(
        "127.0.0.1",
        "Address to listen on. Any other than this machine's own makes a token, which is part of the printed URL.",
        panel=SERVER,
    )
    browser: bool = option(True, "Print the address, and open no browser.", flag="--no-browser", panel=SERVER)


@command(ExploreOptions, ExploreOutput)
def explore(options: Values, output: Values) -> None:
    """Look into every layer and head in the browser, at any length; for an encoding, move its parameters.

    - relpos explore
    - relpos explore kerple_log alibi
    - relpos explore runs/cable --length 2048
    - relpos explore runs/cable --export cable.html
    """
    from relpos.explorer.explore import explore as open_exploration

    own = ExploreOutput(**output)
    if own.export is not None and "what" not in options:
        raise ValueError("nothing to export: name an encoding or a model.")
    if own.export is not None and Path(own.export).suffix.lower() not in (".html", ".htm"):  # before the work
        raise ValueError(f"cannot export to {Path(own.export).name!r}: the name must end in .html.")
    exploration = open_exploration(**options, text=None if own.text is None else _read_text(own.text))
    if own.export is None:
        exploration.serve(own.host, own.port, own.browser, typer.echo)
        return
    file = exploration.save(own.export, Progress("exporting"))
    typer.echo(f"{file}: {file.stat().st_size / 1e6:.1f} MB, one page that needs no server and no network")


def _read_text(file: str) -> str:
    from relpos.text.documents import read_file

    return next(read_file(Path(file), "text")).text


class Progress:
    """Shows the share of the work that is done and the time left; nothing if the work takes less than two seconds.

    In a terminal each line replaces the one before; elsewhere a new line is printed every `every` seconds.
    """

    def __init__(self, verb: str, stream: TextIO | None = None, first: float = 2.0, every: float = 10.0) -> None:
        from relpos.system.progress import LiveLine

        self.verb, self.stream = verb, stream or sys.stderr
        self.line = LiveLine(self.stream)
        self.begun = time.monotonic()
        self.next, self.every = self.begun + first, 0.1 if self.stream.isatty() else every

    def __call__(self, done: float) -> None:
        """Show that a share of the work is done; 1 is all of it."""
        from relpos.system.progress import clock_time

        now = time.monotonic()
        if done >= 1:
            self.line.clear()
        elif now >= self.next and done > 0:
            self.next = now + self.every
            self.line(f"{self.verb} {done:4.0%}  {clock_time((now - self.begun) * (1 - done) / done)} left")
