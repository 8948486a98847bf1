"""The commands that work: draw, figures, paper, explore, check, train, data, evaluate, compare, gpu-report."""

import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from relpos.checking.check_options import CheckOptions
from relpos.cli.from_options import Command, Values, command
from relpos.cli.tables import print_comparison, print_faults, print_report, print_results, print_scores
from relpos.comparison.compare_options import CompareOptions
from relpos.encodings.registry import canonical, check_encoding_or_folder, check_options_of
from relpos.encodings.registry import names as registered_names
from relpos.evaluation.evaluate_options import EvaluateOptions, of_output
from relpos.explorer.explore_options import ExploreOptions
from relpos.model_catalogue import check_model_exists
from relpos.paper.figures_options import FigureOptions
from relpos.paper.paper_options import PaperOptions
from relpos.pictures.draw_options import (
    COLUMNS,
    WIDTHS,
    DrawOptions,
    check_combination,
    check_encoding,
    check_files,
    of_looks,
    of_values,
)
from relpos.runs.settings import encoding_settings
from relpos.system.files import write_text, writing
from relpos.system.options import COUNT, NOT_NEGATIVE, Range, check_options, option
from relpos.system.progress import Countdown, LiveLine
from relpos.training.prepare_data import DataOptions
from relpos.training.train import TrainOptions

if TYPE_CHECKING:
    from relpos.runs.results import TaskResult, TextResult
    from relpos.system.executors import Executor

# -- Where the parts of a command run: processes of this machine, a Ray cluster, or SLURM

of_cluster = partial(option, panel="Where the parts run (docs/scale.md)")  # group in the help
OPTIONS = "model.options."  # begins the settings that are options of an encoding
UNITS = {"KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
ADDRESS = re.compile(r"auto|local|ray://.*|[\w.-]+:\d+|\[[\da-fA-F:]+\]:\d+")


@dataclass(eq=False, repr=False)
class ClusterOptions:
    """Where the parts of a command run."""

    workers: int | None = of_cluster(
        None,
        "Parts at a time. Those of this machine divide its cores among them.",
        shown="1; on a cluster as many as have a place",
        range=COUNT,
    )
    cores: int | None = of_cluster(
        None,
        "Cores of each part, and its threads: the same number gives the same result to the bit.",
        shown="cores ÷ workers; 1 on a cluster",
        range=COUNT,
    )
    memory: str | None = of_cluster(None, "Memory of each part on a cluster, as in 8GB.", metavar="SIZE")
    gpus: int | None = of_cluster(
        None,
        "GPUs of each part on a cluster. With several, it is trained by one process per GPU.",
        shown="0",
        range=NOT_NEGATIVE,
    )
    ray: str | None = of_cluster(
        None,
        "Run the parts on a Ray cluster: the one of this machine or of RAY_ADDRESS, the one at an address such as "
        "10.0.0.1:6379, or with local one that lasts as long as the command.",
        metavar="[ADDRESS]",
    )
    slurm: bool = of_cluster(False, "Run the parts as jobs of SLURM.")
    slurm_partition: str | None = of_cluster(None, "Partition of the jobs of SLURM.", metavar="NAME")
    slurm_minutes: int | None = of_cluster(
        None, "Time limit of each job of SLURM, in minutes.", shown="60", range=COUNT
    )
    slurm_option: Mapping[str, Any] | None = of_cluster(
        None, "Any other option of sbatch, as in account=lab.", metavar="KEY=VALUE"
    )


class ClusterCommand(Command):
    """A command whose option --ray may stand without an address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Fill in the address where it is left out, before the options are parsed."""
        return super().parse_args(ctx, with_address(args))


def with_address(arguments: list[str]) -> list[str]:
    """The arguments of a command with the address auto where --ray has none.

    The next argument is an address only if it looks like one: it may also be a setting or the folder of a run. An empty
    one is an address too, which the command then refuses.
    """
    following = [*arguments[1:], "-"]  # which is not an address
    return [
        "--ray=auto" if word == "--ray" and after.strip() and not ADDRESS.fullmatch(after) else word
        for word, after in zip(arguments, following, strict=False)
    ]


def parse_memory(text: str) -> int:
    """A size in bytes: 8GB, 512MB, or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)?", text.strip().upper())
    if match is None or not float(match[1]):
        raise ValueError(f"--memory takes a size such as 8GB or 512MB, not {text!r}.")
    return int(float(match[1]) * UNITS.get(match[2] or "", 1))


def make_executor(options: ClusterOptions, default_workers: int | None = None) -> "Executor | None":
    """The executor that the options describe; without any, `default_workers` processes, or None: this process."""
    from relpos.system.executors import LocalExecutor, Resources

    memory, gpus, workers = options.memory, options.gpus, options.workers
    of_slurm = (options.slurm_partition, options.slurm_minutes, options.slurm_option)
    if options.ray is not None and options.slurm:
        raise ValueError("give --ray or --slurm, not both.")
    if not options.slurm and of_slurm != (None, None, None):
        raise ValueError("--slurm-partition, --slurm-minutes and --slurm-option go with --slurm.")
    resources = Resources(options.cores or 1, None if memory is None else parse_memory(memory), gpus or 0)
    if options.ray is not None:
        from relpos.system.ray import RayExecutor

        return RayExecutor(options.ray, resources, workers)
    if options.slurm:
        from relpos.system.slurm import SlurmExecutor

        partition, minutes, others = of_slurm
        return SlurmExecutor(resources, workers, partition, minutes, dict(others or {}))
    if memory is not None or gpus is not None:
        raise ValueError("--memory and --gpus go with --ray or --slurm: processes of this machine share what it has.")
    if workers is None and options.cores is None and default_workers is None:
        return None
    return LocalExecutor(workers or default_workers or 1, options.cores)


# -- The commands


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
    train_options = TrainOptions(**options)
    settings = train_options.settings()
    if settings.model.start is not None:
        check_model_exists(settings.model.start)

    from relpos.training.training import train as train_model

    train_model(settings, verbose=train_options.verbose)


@command(DataOptions)
def data(options: Values) -> None:
    """Tokenize a text before training, into the cache. If interrupted, rerun the command to resume.

    The text is written in chunks, which relpos train with the same settings of the data reads. With data.stream=true
    the text is never read twice, and training may start before this has ended.

    - relpos data prepare --data my/texts --tokenizer gpt2
    - relpos data prepare --data my/fineweb --tokenizer gpt2 data.heldout=1e8 data.stream=true
    - relpos data prepare --config paper-small
    """
    from relpos.training.prepare_data import prepare

    done = prepare(DataOptions(**options))
    held = "" if done["held_out"] is None else f", {done['held_out']:,} of them held out"
    what = f"{done['documents']:,} documents, {done['tokens']:,} tokens{held}"
    typer.echo(f"{what}: {done['chunks']:,} chunks in {done['folder']}")


@dataclass(eq=False, repr=False)
class EvaluateOutput:
    """What only the command `relpos evaluate` has."""

    json: bool = of_output(False, "Print JSON instead of the table.")


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
    check_options(EvaluateOptions(**options))
    for run in options["runs"]:
        check_model_exists(run)
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


@dataclass(frozen=True, kw_only=True)
class CheckOutput:
    """What only the command `relpos check` has."""

    json: str | None = of_output(None, "Also write the report as JSON.", metavar="FILE")
    html: str | None = of_output(None, "Also write the report as one self-contained page.", metavar="FILE")
    markdown: str | None = of_output(None, "Also write the report as Markdown.", metavar="FILE")
    faults: bool = of_output(False, "List the kinds of faults that are recognised, and check nothing.")


@command(CheckOptions, CheckOutput)
def check(options: Values, output: Values) -> None:
    """Check whether the positions of a model are right: against themselves, and against its configuration.

    Prints what was tested, by how much it is off, where that begins, what it usually means and what mends it: see
    docs/check.md. Exit status: 0 right, 1 wrong, 2 could not be tested.

    - relpos check HuggingFaceTB/SmolLM2-135M
    - relpos check my/port --against my/original
    - relpos check my/port --only rotation,cache --html report.html
    - relpos check --faults
    """
    files = CheckOutput(**output)
    if files.faults:
        print_faults()
        return
    paths = {
        suffix: Path(file)
        for suffix, file in ((".json", files.json), (".html", files.html), (".md", files.markdown))
        if file is not None
    }
    for suffix, path in paths.items():  # before the work, not after it
        if path.suffix != suffix:
            raise ValueError(f"{path.name!r} must end in {suffix}.")

    model, *others = options.pop("model", [None])
    if others:
        raise ValueError("one model is checked at a time: to compare two ports, give the other by --against.")
    for name in (model, options.get("against")):
        if name is not None:
            check_model_exists(name)

    from relpos.checking.check import check as check_model

    line = LiveLine(sys.stderr, every=10.0, first=10.0)
    report = check_model(model, **options, say=line)
    line.clear()
    print_report(report)
    for path in paths.values():
        typer.echo(str(report.save(path)))
    raise typer.Exit(report.exit_status)


def check_entry(entry: str) -> None:
    """Refuse an entry of --encodings with an unknown encoding or option, without torch."""
    settings = encoding_settings(entry)
    rules = settings.get("model.plan", ())
    for name in [*settings.get("model.options.parts", ()), *(rule["name"] for rule in rules if "name" in rule)]:
        check_options_of(str(name), ())
    options = {key.removeprefix(OPTIONS) for key in settings if key.startswith(OPTIONS)}
    check_options_of(settings["model.encoding"], sorted(options))


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
    for encoding in options.get("encodings", []):
        check_entry(encoding)
    where = make_executor(ClusterOptions(**cluster), default_workers=1)

    from relpos.comparison.compare import compare as compare_encodings

    with where or contextlib.nullcontext() as executor:
        words = shlex.join(["relpos", *sys.argv[1:]])
        report = compare_encodings(**options, executor=executor, command=words, say=typer.echo)
    print_comparison(report.html.parent)
    typer.echo(f"{report.html}\n{report.markdown}")
    if report.failed:
        raise typer.Exit(1)


@dataclass(eq=False, repr=False)
class DrawOutput:
    """What only the command `relpos draw` has."""

    out: str | None = option(
        None,
        "A .png, .pdf or .svg file; or a .json, .npz or .safetensors file for the numbers alone, or a .txt file for "
        "the caption.",
        shown="WHAT.png",
        metavar="FILE",
    )
    numbers: str | None = option(
        None,
        "Also write the numbers behind the picture: every array to a .npz or .safetensors file, or the small ones to a "
        ".json file (docs/figures.md).",
        metavar="FILE",
    )
    text_file: str | None = of_values(None, "File with text for the model to read.", metavar="FILE")
    columns: int = of_looks(COLUMNS, "Width in columns of a printed page: 1 or 2; or give --width.", range=Range(1, 2))


@command(DrawOptions, DrawOutput)
def draw(options: Values, output: Values) -> None:
    """Draw what an encoding does: one heat map per head, untrained or of a trained model.

    - relpos draw alibi
    - relpos draw runs/cable --text "To be, or not to be" --label-tokens
    - relpos draw runs/cable --layer all --shared-scale
    - relpos draw kerple_log --show profile --columns 1 --out kerple.pdf
    - relpos draw alibi rope fire
    - relpos draw kerple_log fire t5 --show profile --log --head 1
    - relpos draw --all
    - relpos draw runs/cable --layer all --show mass
    - relpos draw runs/cable --show weights --numbers weights.npz
    """
    files = DrawOutput(**output)
    what = options.pop("what", [])
    names = "-".join(Path(name).resolve().name for name in what)
    path = Path(files.out or f"{names or 'encodings'}.png")
    numbers = None if files.numbers is None else Path(files.numbers)
    # Before the work, and before torch and matplotlib are imported, which takes seconds.
    check_files(path, numbers)
    check_options(checked := DrawOptions(what, **options))
    check_combination(what, checked)
    if files.text_file is not None and "text" in options:
        raise ValueError("give --text or --text-file, not both.")
    for item in what:
        check_encoding_or_folder(item)
        if canonical(item) in registered_names():
            check_encoding(canonical(item), checked)
    if files.text_file is not None:
        options |= {"text": _read_text(files.text_file), "text_name": files.text_file}
    options.setdefault("width", WIDTHS[files.columns])

    from relpos.pictures.draw import draw as draw_picture

    with _progress("drawing") as progress:
        picture = draw_picture(what[0] if len(what) == 1 else what, **options, progress=progress)
        saved = picture.save(path)
    typer.echo(f"{saved}: {picture.caption}")
    if numbers is not None:
        typer.echo(f"{picture.save(numbers)}: the numbers behind it")
    if options.get("caption") is False:
        typer.echo(f"{picture.save(path.with_suffix('.txt'))}: the caption, for LaTeX")


@command(FigureOptions)
def figures(options: Values) -> None:
    """Make the figures of the CABLE paper: train the missing models, draw, and put all on one page (index.html).

    Figure 12 (ALiBi) needs no training and is ready within seconds.

    The others: 4 CABLE beside ALiBi, 8 CABLE, 10 Kerple, 13 FIRE, 14 T5-bias (clipped), 15 RoPE.

    Only if asked for by --figure, since they train longer: 5 CABLE and K-CABLE, 9 and 11 DAPEv2 over CABLE and Kerple.

    The models are kept in RUNS/figures-ENCODING-PRESET.
    """
    check_options(FigureOptions(**options))

    from relpos.paper.figures import draw_figures

    failed = draw_figures(**options, say=typer.echo)
    if failed:
        raise ValueError(
            f"{len(failed)} of the figures could not be made (see above); the others are in "
            f"{FigureOptions(**options).out}."
        )


@command(PaperOptions)
def paper(options: Values) -> None:
    """The CABLE paper, table by table: what it needs, one cell of it, and how a run compares with what is printed.

    Without arguments it lists every table and figure, and with a name the cells and what is known of their printed
    numbers. Training and evaluation follow the recipe of the authors' code; docs/paper.md lists where it differs from
    the printed text.

    - relpos paper
    - relpos paper table4
    - relpos paper deviations
    - relpos paper run table4 --size tiny --row cable
    - relpos paper run table4 --size tiny --row cable --shrink
    - relpos paper run all --shrink
    - relpos paper run figure3 --size small
    - relpos paper verify runs/paper-table4-cable-tiny-fineweb-edu
    """
    from relpos.cli.paper_tables import print_item, print_items, print_verdict

    given = PaperOptions(**options, say=typer.echo)
    check_options(given)
    action, *rest = [*given.words, ""]
    rest = [word for word in rest if word]
    if action == "run":
        _run_paper(given, rest)
    elif action == "verify":
        from relpos.paper.reproduce import cell_of, verify

        if not rest:
            raise ValueError("relpos paper verify takes the folder of a run.")
        verdict = verify(rest[0], cell_of(given, rest[1])[1] if rest[1:] else None)
        typer.echo(json.dumps(verdict.as_json(), indent=1)) if given.json else print_verdict(verdict)
        raise typer.Exit(0 if verdict.reproduced else 1)
    elif action:
        print_item(action, given)
    else:
        print_items(given)


def _run_paper(given: PaperOptions, words: list[str]) -> None:
    from relpos.cli.paper_tables import print_smoke, print_speeds
    from relpos.paper.catalogue import item
    from relpos.paper.reproduce import run_cell

    if not words:
        raise ValueError("relpos paper run takes the name of a table or figure, as in relpos paper run table4.")
    name, *overrides = words
    if name == "all":
        print_smoke(given)
        return
    if item(name).kind == "speed":
        print_speeds(name, given)
        return
    typer.echo(str(run_cell(given, name, overrides)))


of_server = partial(option, panel="The server")  # group in the help


@dataclass(eq=False, repr=False)
class ExploreOutput:
    """What only the command `relpos explore` has."""

    text: str | None = option(None, "File with text for the models to read.", shown="held-out text", metavar="FILE")
    export: str | None = option(
        None, "Write one self-contained .html file instead, which needs no server.", metavar="FILE"
    )
    port: int | None = of_server(None, "Port; the next free one if it is taken.", shown="8123", range=Range(0, 65535))
    host: str = of_server(
        "127.0.0.1",
        "Address to listen on. Any other than this machine's own makes a token, which is part of the printed URL.",
    )
    browser: bool = of_server(True, "Print the address, and open no browser.", flag="--no-browser")


@command(ExploreOptions, ExploreOutput)
def explore(options: Values, output: Values) -> None:
    """Look into every layer and head in the browser, at any length; for an encoding, move its parameters.

    - relpos explore
    - relpos explore kerple_log alibi
    - relpos explore runs/cable --length 2048
    - relpos explore runs/cable --export cable.html
    """
    server = ExploreOutput(**output)
    if server.export is not None and "what" not in options:
        raise ValueError("nothing to export: name an encoding or a model.")
    if server.export is not None and Path(server.export).suffix.lower() not in (".html", ".htm"):  # before the work
        raise ValueError(f"cannot export to {Path(server.export).name!r}: the name must end in .html.")
    for item in options.get("what", ()):
        check_encoding_or_folder(item)

    from relpos.explorer.explore import explore as open_exploration

    exploration = open_exploration(**options, text=None if server.text is None else _read_text(server.text))
    if server.export is None:
        exploration.serve(server.host, server.port, server.browser, typer.echo)
        return
    with _progress("exporting") as progress:
        file = exploration.save(server.export, progress)
    typer.echo(f"{file}: {file.stat().st_size / 1e6:.1f} MB, one page that needs no server and no network")


@dataclass(eq=False, repr=False)
class GpuReportOptions:
    """The options of `relpos gpu-report`."""

    quick: bool = option(False, "Leave out float16, float32 and all but one size.")
    out: str | None = option(
        None, "Also write the report to a .md file, or its numbers to a .json file.", metavar="FILE"
    )


@command(GpuReportOptions)
def gpu_report(options: Values) -> None:
    """Try the GPU kernels on this machine, and print a report in Markdown: paste it into an issue.

    It compares every form and argument with the definition; measures time and memory of forward and backward, beside
    PyTorch's attention without a bias and FlexAttention with the same bias; and names GPU, driver and versions. On a
    GPU that takes about ten minutes, mostly of compilers. Without one, Triton's interpreter runs the kernels on the
    CPU, for correctness alone, in less than a minute.

    - relpos gpu-report
    - relpos gpu-report --quick --out report.json
    """
    file = None if "out" not in options else Path(options["out"])
    if file is not None and file.suffix.lower() not in (".md", ".json"):  # before the work
        raise ValueError(f"cannot write a report to {file.name!r}: the name must end in .md or .json.")
    if file is not None:
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)

    from relpos.attend.gpu_report import gpu_report as make_report
    from relpos.cli.tables import gpu_report_page

    with _progress("trying the kernels") as progress:
        report = make_report(quick=options.get("quick", False), progress=progress)
    page = gpu_report_page(report)
    typer.echo(page)
    if file is not None:
        text = page if file.suffix.lower() == ".md" else json.dumps(report, indent=1)
        write_text(file, text + "\n")
        typer.echo(str(file), err=True)
    if not all(row["passed"] for row in report["correctness"]):
        raise typer.Exit(1)


def _read_text(file: str) -> str:
    from relpos.text.documents import read_file

    return next(read_file(Path(file), "text")).text


@contextlib.contextmanager
def _progress(verb: str) -> Iterator[Callable[[float], None]]:
    """Show the share of the work that is done and the time left; nothing if the work takes less than two seconds.

    The time is that since the first call: what was loaded before it says nothing about the speed of the work.
    """
    line = LiveLine(sys.stderr, every=10.0)
    countdown: Countdown | None = None
    before = 0.0

    def show(done: float) -> None:
        nonlocal countdown, before
        if countdown is None:
            countdown = Countdown(1.0 - done, line, every=2.0)
        elif before < done < 1:
            countdown.step(done - before, f"{verb} {done:4.0%}")
        before = done

    try:
        yield show
    finally:
        line.clear()
