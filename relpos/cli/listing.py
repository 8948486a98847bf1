"""relpos ls and relpos info: encodings, tasks, the positions of a model, and what attention runs on."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated

import typer

from relpos.cli.from_options import beginning
from relpos.cli.tables import card_table, print_table
from relpos.encodings.registry import card, names
from relpos.forms.cards import HEAD_DIM, HEADS, Card
from relpos.training.train import task_names


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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table, as in the README.")] = False,
) -> None:
    """List the encodings, or show one with its formula and options, or the positions of a model."""
    if tasks:
        list_tasks(name, as_json)
        return
    if as_json and markdown:
        raise ValueError("--json and --markdown exclude each other: give only one of them.")
    if name and name not in names() and is_model(name):
        if markdown:
            raise ValueError("--markdown is for encodings: leave it out, or use --json.")
        show_model(name, as_json)
        return
    cards = [card(each) for each in ([name] if name else names())]
    if as_json:
        entries = [dataclasses.asdict(each) for each in cards]
        typer.echo(json.dumps(entries[0] if name else entries, indent=2, ensure_ascii=False))
    elif markdown:
        typer.echo(markdown_table(cards))
    elif name:
        _print_card(cards[0])
    else:
        _print_table(cards)


def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")] = False) -> None:
    """Show the backend, instruction set, threads and versions that attention runs on here."""
    from relpos.attend.backends import describe

    facts = describe()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    native = "native kernel; chunks of torch for biases that read the scores"
    lines = {
        "relpos": facts["relpos"],
        "torch": facts["torch"],
        "on a CPU": f"chunks of torch: {facts['native_missing']}" if facts["native_missing"] else native,
        "threads": facts["threads"],
        "on CUDA": f"FlexAttention, compiled ({facts['cuda_device']})" if facts["cuda_device"] else "no device here",
    }
    if facts["instruction_set"]:
        lines["instruction set"] = (
            f"{facts['instruction_set']} (this CPU supports {', '.join(facts['instruction_sets'])})"
        )
    for title, value in lines.items():
        typer.echo(f"{title:16} {value}")


def markdown_table(cards: list[Card]) -> str:
    """The encodings as a Markdown table, one row per card, with links to the papers."""
    lines = ["| name | place | what it is | learned per head | paper |", "|---|---|---|---:|---|"]
    for each in cards:
        papers = re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[\1](https://arxiv.org/abs/\1)", each.paper)
        cells = (f"`{each.name}`", each.place, each.summary, each.learned, papers)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _print_table(cards: list[Card]) -> None:
    fields = ("name", "place", "form", "learned", "directions", "paper")
    rows = [[str(getattr(each, field)) for field in fields] for each in cards]
    print_table(["name", "place", "form", "learned per head", "directions", "paper"], rows, unwrapped=("name", "place"))


def _print_card(shown: Card) -> None:
    shapes = ", ".join(f"{name} {shape}" for name, shape in shown.parameters.items())
    rows = {
        shown.name: shown.summary,
        "formula": shown.formula,
        "place": shown.place,
        "form": shown.form,
        "learned per head": f"{shown.learned} ({HEADS} heads, head_dim {HEAD_DIM}, default options)",
        "parameters": shapes or "none",
        "directions": shown.directions,
        "paper": shown.paper,
    }
    for name, option in shown.options.items():
        rows[f"  {name}={option.default}"] = f"{option.type}. {option.meaning}"
    card_table(rows)


def list_tasks(name: str | None, as_json: bool) -> None:
    """List the tasks, or show one with an example."""
    from relpos.tasks import task

    tasks = [task(each) for each in ([name] if name else task_names())]
    if as_json:
        fields = ("name", "summary", "measures", "layout", "paper", "shortest", "chance", "has_depth")
        cards = [{field: getattr(each, field) for field in fields} for each in tasks]
        typer.echo(json.dumps(cards[0] if name else cards, indent=2, ensure_ascii=False))
    elif name:
        shown = tasks[0]
        rows = {shown.name: shown.summary, "measures": shown.measures, "layout": shown.layout, "paper": shown.paper}
        rows |= {"words": str(len(shown.words)), "shortest": f"{shown.shortest} tokens"}
        card_table({**rows, "chance": f"{shown.chance:.1%}", "example": shown.example()})
    else:
        rows_of = [[each.name, each.summary, each.measures, each.paper] for each in tasks]
        print_table(["name", "what it is", "measures", "paper"], rows_of, unwrapped=("name",))


def is_model(name: str) -> bool:
    """Whether a name can be that of a model: a folder, a file, or owner/name on the hub."""
    return Path(name).exists() or name.endswith(".gguf") or "/" in name


def show_model(name: str, as_json: bool) -> None:
    """Print what is known of a model from its configuration: sizes, positions, what relpos can do with it.

    Args:
        name: A folder, a .gguf file or a name on the hub.
        as_json: Whether to print JSON.
    """
    from transformers.utils import logging

    from relpos.pretrained.positions import facts
    from relpos.pretrained.source import read_config

    logging.set_verbosity_error()  # its warnings of unusual entries would stand among the lines
    known = facts(read_config(name))
    length = trained_length(name)
    if length is not None:
        known = dataclasses.replace(known, trained_length=length)
    if as_json:
        typer.echo(json.dumps({"name": name, **dataclasses.asdict(known)}, indent=2, ensure_ascii=False))
        return

    heads = f"{known.heads}, head_dim {known.head_dim}"
    if known.key_heads != known.heads:
        heads += f", {known.key_heads} key heads"
    tokens = "not limited by the configuration" if known.trained_length is None else f"{known.trained_length:,} tokens"
    card_table(
        {
            "model": f"{name} (model type {known.model_type})",
            "layers": str(known.layers),
            "heads": heads,
            "length": tokens,
            "positions": "\n".join(known.positions),
            "relpos.use": f"yes ({known.use_reason})" if known.use else f"refused: {known.use_reason}",
            "relpos.transplant": "yes" if known.transplant else "no",
        }
    )


def trained_length(name: str) -> int | None:
    """The length of the windows that a run of relpos was trained on; None for any other folder."""
    from relpos.runs.results import ABOUT, read_about

    folder = Path(name)
    return read_about(folder)[0].data.length if (folder / ABOUT).is_file() else None
