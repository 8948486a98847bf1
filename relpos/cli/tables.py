"""Tables that the commands print; and relpos ls and relpos info, which print nothing else."""

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relpos.cli.from_options import beginning
from relpos.encodings.registry import ALIASES, canonical, card, names
from relpos.forms.cards import HEAD_DIM, HEADS, Card
from relpos.training.train import task_names

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from relpos.attend.gpu_report import Report as GpuReport
    from relpos.checking.findings import Report as CheckReport
    from relpos.runs.results import TaskResult, TextResult

JSON = Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")]
STAR = "* the trained length"


def console() -> "Console":
    """The console that tables are printed to; wide if the output is not a terminal."""
    from rich.console import Console

    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=160)


def print_table(
    head: Sequence[str],
    rows: Iterable[Sequence["str | Text"]],
    *,
    unwrapped: Collection[str] | None = None,
    left: int | None = None,
    **more: Any,
) -> None:
    """Print a table whose `unwrapped` columns (None: all) stay on one line and whose first `left` (None: all) are text.

    [Brackets] in cells are not markup.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", **more)
    for place, column in enumerate(head):
        justify = "right" if left is not None and place >= left else "left"
        unbroken = unwrapped is None or column in unwrapped
        table.add_column(column, justify=justify, overflow="fold", no_wrap=unbroken)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    console().print(table)


def print_card(rows: Mapping[str, str]) -> None:
    """Print what is known of one thing: titles on the left, texts on the right."""
    from rich.text import Text

    titles = [Text(title, style="bold") for title in rows]
    print_table(["", " "], zip(titles, rows.values(), strict=True), unwrapped=[""], show_header=False)


def print_json(value: object) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


# -- Evaluations and comparisons


def _length(row: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """A length as a cell, with a star if it is the trained one."""
    return f"{row['length']}{'*' if row['length'] == result['trained_length'] else ''}"


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
    head = [
        "run",
        "length",
        metric,
        "95 %",
        "loss",
        "bits/byte",
        "windows",
        "documents",
        "tokens",
        "tokens/s",
        "memory",
    ]
    rows = []
    for label, result in results.items():
        for row in result["rows"]:
            cells = [label, _length(row, result)]
            if row["error"]:
                rows.append([*cells, "–"])
                continue
            low, high, bits = row["low"], row["high"], row["bits_per_byte"]
            cells += [f"{row['perplexity']:.2f}", "" if low is None else f"{low:.2f} – {high:.2f}"]
            cells += [f"{row['loss']:.4f}", "" if bits is None else f"{bits:.4f}", str(row["windows"])]
            cells.append(f"1 ({row['blocks']} blocks)" if row["blocks"] else str(row["documents"]))
            cells += [f"{row['tokens']:,}", f"{row['tokens_per_second']:,.0f}"]
            rows.append([*cells, f"{row['peak_memory_bytes'] / 2**20:,.0f} MB"])
    print_table(head, rows, left=1, caption=STAR)


def _print_bins(results: "Mapping[str, TextResult]") -> None:
    rows = []
    for label, result in results.items():
        for entry in result["bins"]:
            low, high, known = entry["difference_low"], entry["difference_high"], entry["low"] is not None
            cells = [label, f"{entry['from']} – {entry['to'] - 1}", f"{entry['loss']:.4f}"]
            cells += [f"{entry['low']:.4f} – {entry['high']:.4f}" if known else "", f"{entry['control']:.4f}"]
            cells += [f"{entry['difference']:+.4f}", f"{low:+.4f} – {high:+.4f}" if known else ""]
            rows.append([*cells, f"{entry['tokens']:,}"])
    print_table(["run", "positions", "loss", "95 %", "control", "difference", "95 %", "tokens"], rows, left=1)


def print_scores(results: "Mapping[str, TaskResult]") -> None:
    """Print one table per run: the share of right answers by length."""
    for label, result in results.items():
        rows = []
        for row in result["rows"]:
            cells = ["", "", "", "", row["error"] or ""]
            if not row["error"]:
                cells[:3] = [f"{row['accuracy']:.1%}", f"{row['low']:.1%} – {row['high']:.1%}", f"{row['exact']:.1%}"]
                cells[3] = str(row["samples"])
            rows.append([_length(row, result), *cells])
        print_table(["length", "answers right", "95 %", "all right", "sequences", ""], rows, unwrapped=(), left=0)
        trained = f"{STAR}; " if result["trained_length"] else ""
        guess = f"a guess is right {result['chance']:.1%} of the time."
        typer.echo(f"{label}: {result['task']} with {result['encoding']}; {trained}{guess}")


def print_comparison(out: Path) -> None:
    """Print the perplexities of a comparison by length; the lowest are bold."""
    from rich.text import Text

    from relpos.comparison import summary
    from relpos.comparison.comparison import load_comparison

    comparison = load_comparison(out)
    records = summary.read_records(comparison, out)
    standings = summary.make_standings(comparison, records)
    marked = {length: at_length.marked for length, at_length in standings.items()}
    head = [f"{length} (trained)" if length == comparison.length else str(length) for length in comparison.lengths]
    rows: list[list[str | Text]] = []
    for encoding, row in summary.make_table(comparison, records).items():
        styles = ["bold" if encoding in marked.get(length, ()) else "" for length in row]
        rows.append([encoding, *(Text(str(cell), style) for cell, style in zip(row.values(), styles, strict=True))])
    print_table(["encoding", *head], rows, left=1, title=f"{comparison.family.metric} by length")
    for note in [*summary.marking(standings), *summary.notes(comparison, records)]:
        typer.echo(note)


def print_report(report: "CheckReport") -> None:
    """Print the findings of a check; those that failed are bold, with what they mean below the table."""
    from rich.text import Text

    from relpos.checking.findings import FAILED

    for line in report.positions:
        typer.echo(line)
    rows = []
    for finding, cells in zip(report.findings, report.rows(), strict=True):
        style = "bold" if finding.status == FAILED else ""
        rows.append([Text(cell, style) for cell in cells[:4]])
    print_table(["test", "result", "by how much", "begins"], rows, unwrapped=("test", "result"))
    for finding in report.findings:
        if finding.status == FAILED:
            name = f" [{finding.fault}]" if finding.fault else ""
            typer.echo(f"\n{finding.title}{name}: {finding.diagnosis}")
            if finding.remedy:
                typer.echo(f"  {finding.remedy}")
    typer.echo(f"\n{report.summary}")


def print_faults() -> None:
    """List the kinds of faults that a check recognises."""
    from relpos.checking.faults import faults

    rows = [[fault.name, " or ".join(fault.tests), fault.diagnosis] for fault in faults()]
    print_table(["fault", "found by", "what it is"], rows, unwrapped=("fault", "found by"))


# -- relpos ls


def complete_encoding_or_task(ctx: typer.Context, incomplete: str) -> list[str]:
    """Encodings by name, or tasks after --tasks."""
    return beginning(task_names() if ctx.params.get("tasks") else names(), incomplete)


def list_encodings(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Show this encoding (with --tasks, this task) in detail, or where position lives in this model: "
            "a folder, a .gguf file or a name on the hub.  [default: list all]",
            autocompletion=complete_encoding_or_task,
        ),
    ] = None,
    tasks: Annotated[bool, typer.Option("--tasks", help="List the tasks of relpos train --task instead.")] = False,
    as_json: JSON = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table, as in the README.")] = False,
) -> None:
    """List the encodings, or show one with its formula and options, or the positions of a model."""
    if tasks:
        list_tasks(name, as_json)
        return
    if as_json and markdown:
        raise ValueError("--json and --markdown exclude each other: give only one of them.")
    if name and canonical(name) not in names() and (Path(name).exists() or name.endswith(".gguf") or "/" in name):
        if markdown:
            raise ValueError("--markdown is for encodings: leave it out, or use --json.")
        show_model(name, as_json)
        return
    cards = [card(known) for known in ([name] if name else names())]
    if as_json:
        entries = [dataclasses.asdict(shown) for shown in cards]
        print_json(entries[0] if name else entries)
    elif markdown:
        typer.echo(markdown_table(cards))
    elif name:
        _print_encoding(cards[0])
    else:
        rows = [[shown.name, shown.summary, shown.place, shown.learned] for shown in cards]
        print_table(["name", "what it is", "place", "learned per head"], rows, unwrapped=("name", "place"))
        others = ", ".join(f"{alias} for {ours}" for alias, ours in ALIASES.items())
        typer.echo(f"Also known: {others}. relpos ls NAME shows formula, paper and options.")


def markdown_table(cards: list[Card]) -> str:
    """The encodings as a Markdown table, one row per card, with links to the papers."""
    lines = ["| name | place | what it is | learned per head | paper |", "|---|---|---|---:|---|"]
    for shown in cards:
        papers = re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[\1](https://arxiv.org/abs/\1)", shown.paper)
        cells = (f"`{shown.name}`", shown.place, shown.summary, shown.learned, papers)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _print_encoding(shown: Card) -> None:
    shapes = ", ".join(f"{name} {shape}" for name, shape in shown.parameters.items())
    rows = {
        shown.name: shown.summary,
        **({"also known as": ", ".join(shown.aliases)} if shown.aliases else {}),
        "formula": shown.formula,
        "place": shown.place,
        "form": shown.form,
        "learned per head": f"{shown.learned} ({HEADS} heads, head_dim {HEAD_DIM}, default options)",
        "parameters": shapes or "none",
        "directions": shown.directions,
        "paper": shown.paper,
    }
    options = {f"  {key}={about.default}": f"{about.type}. {about.meaning}" for key, about in shown.options.items()}
    print_card({**rows, **options})


def list_tasks(name: str | None, as_json: bool) -> None:
    """List the tasks, or show one with an example."""
    from relpos.tasks import task

    tasks = [task(known) for known in ([name] if name else task_names())]
    if as_json:
        fields = ("name", "summary", "measures", "layout", "paper", "shortest", "chance", "has_depth")
        cards = [{field: getattr(shown, field) for field in fields} for shown in tasks]
        print_json(cards[0] if name else cards)
    elif name:
        shown = tasks[0]
        rows = {shown.name: shown.summary, "measures": shown.measures, "layout": shown.layout, "paper": shown.paper}
        rows |= {"words": str(len(shown.words)), "shortest": f"{shown.shortest} tokens"}
        print_card({**rows, "chance": f"{shown.chance:.1%}", "example": shown.example()})
    else:
        rows_of = [[shown.name, shown.summary, shown.measures, shown.paper] for shown in tasks]
        print_table(["name", "what it is", "measures", "paper"], rows_of, unwrapped=("name",))


def show_model(name: str, as_json: bool) -> None:
    """Print what is known of a model from its configuration: sizes, positions, what relpos can do with it."""
    from transformers.utils import logging

    from relpos.pretrained.positions import facts
    from relpos.pretrained.source import read_config
    from relpos.runs.results import ABOUT, read_about

    logging.set_verbosity_error()  # its warnings of unusual entries would stand among the lines
    known = facts(read_config(name))
    if Path(name, ABOUT).is_file():  # a run of relpos
        known = dataclasses.replace(known, trained_length=read_about(Path(name))[0].data.length)
    if as_json:
        print_json({"name": name, **dataclasses.asdict(known)})
        return
    key_heads = "" if known.key_heads == known.heads else f", {known.key_heads} key heads"
    tokens = "not limited by the configuration" if known.trained_length is None else f"{known.trained_length:,} tokens"
    print_card(
        {
            "model": f"{name} (model type {known.model_type})",
            "layers": str(known.layers),
            "heads": f"{known.heads}, head_dim {known.head_dim}{key_heads}",
            "length": tokens,
            "positions": "\n".join(known.positions),
            "relpos.use": f"yes ({known.use_reason})" if known.use else f"refused: {known.use_reason}",
            "relpos.transplant": "yes" if known.transplant else "no",
        }
    )


def info(as_json: JSON = False) -> None:
    """Show the backend, instruction set, threads and versions that attention runs on here."""
    from relpos.attend.backends import describe

    facts = describe()
    if as_json:
        print_json(facts)
        return
    native = "native kernel; chunks of torch for biases that read the scores"
    lines = {
        "relpos": facts["relpos"],
        "torch": facts["torch"],
        "on a CPU": f"chunks of torch: {facts['native_missing']}" if facts["native_missing"] else native,
        "threads": facts["threads"],
        "on CUDA": "no device here",
        "Triton kernels": facts["triton_missing"] or "relpos gpu-report tries them: docs/gpu.md",
    }
    if facts["cuda_device"]:
        first = {"flex": "FlexAttention, compiled", "triton": "Triton kernels"}[facts["cuda_backend"]]
        lines["on CUDA"] = f"{first} ({facts['cuda_device']})"
    if facts["triton_first_use"]:
        lines["Triton kernels"] = "checked at first use, by form:"
    if facts["instruction_set"]:
        supported = ", ".join(facts["instruction_sets"])
        lines["instruction set"] = f"{facts['instruction_set']} (this CPU supports {supported})"
    for title, value in lines.items():
        typer.echo(f"{title:16} {value}")
        for check in facts["triton_first_use"] if title == "Triton kernels" else ():
            word = "right" if check["passed"] else "not used"
            typer.echo(f"{'':16} {check['kernels']}: {word}; {check['result']}")


# -- relpos gpu-report

NO_GPU = (
    "There is no GPU here, or this PyTorch cannot use it. Triton's interpreter ran the kernels on the CPU: that shows "
    "whether their arithmetic is right, and nothing of speed, of races between threads, or of compilers."
)


def gpu_report_page(report: "GpuReport") -> str:
    """The report of the GPU kernels in Markdown."""
    from relpos.pictures.markdown import table

    rows, wrong = report["correctness"], [row for row in report["correctness"] if not row["passed"]]
    versions = ", ".join(f"{name} {value}" for name, value in report["facts"].items())
    lines = ["# relpos gpu-report", "", NO_GPU if report["interpreted"] else f"On {report['device']}.", ""]
    lines += [f"{versions}. {report['seconds']:.0f} seconds.", "", "## Correctness", ""]
    lines += [
        f"{len(rows) - len(wrong)} of {len(rows)} cases are right: output, log-sum-exp and all gradients differ from "
        "the definition in float64 by at most the limit, relative to the largest entry of the tensor.",
        "",
    ]
    cells = []
    for row in rows:
        size = row["error"] if row["difference"] is None else f"{row['difference']:.1e}"
        bits = {None: "", True: "same", False: "DIFFERENT"}[row["same_bits"]]
        passed = "yes" if row["passed"] else "NO"
        cells.append([row["case"], row["dtype"], passed, size, row["tensor"], f"{row['limit']:.0e}", bits])
    lines.append(table(["case", "dtype", "right", "difference", "of", "limit", "bits of two runs"], cells))
    if report["speed"]:
        lines += ["", "## Speed", "", "bfloat16; best of several rounds, in turns; ratio to SDPA without a bias.", ""]
        timed = []
        for entry in report["speed"]:
            what = [entry["form"], entry["what"], str(entry["head_dim"]), str(entry["length"]), entry["backend"]]
            if entry["milliseconds"] is None:
                timed.append([*what, entry["error"], "", "", ""])
                continue
            ratio = "" if entry["ratio"] is None else f"{entry['ratio']:.2f}"
            other = "" if entry["difference"] is None else f"{entry['difference']:.0e}"
            timed.append([*what, f"{entry['milliseconds']:.3f}", ratio, f"{entry['megabytes']:.0f}", other])
        head = ["bias", "what", "head_dim", "length", "backend", "ms", "ratio", "MB", "differs from triton"]
        lines.append(table(head, timed))
    return "\n".join(lines)
