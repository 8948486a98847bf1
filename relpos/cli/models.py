"""relpos ls MODEL: where position lives in a model. Imports nothing heavy before a model is shown."""

import dataclasses
import json
from pathlib import Path

import typer

from relpos.cli.options import console


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

    from relpos.pretrained.facts import facts
    from relpos.pretrained.source import read_config

    logging.set_verbosity_error()  # its warnings of unusual entries would stand among the lines
    known = facts(read_config(name))
    length = trained_length(name)
    if length is not None:
        known = dataclasses.replace(known, trained_length=length)
    if as_json:
        typer.echo(json.dumps({"name": name, **dataclasses.asdict(known)}, indent=2, ensure_ascii=False))
        return

    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    heads = f"{known.heads}, head_dim {known.head_dim}"
    if known.key_heads != known.heads:
        heads += f", {known.key_heads} key heads"
    tokens = "not limited by the configuration" if known.trained_length is None else f"{known.trained_length:,} tokens"
    table.add_row("model", f"{name} (model type {known.model_type})")
    table.add_row("layers", str(known.layers))
    table.add_row("heads", heads)
    table.add_row("length", tokens)
    table.add_row("positions", "\n".join(known.positions))
    table.add_row("relpos.use", f"yes ({known.use_reason})" if known.use else f"refused: {known.use_reason}")
    table.add_row("relpos.transplant", "yes" if known.transplant else "no")
    console().print(table, markup=False)


def trained_length(name: str) -> int | None:
    """The length of the windows that a run of relpos was trained on; None if it is no such folder."""
    from relpos.runs.run import ABOUT, read_about

    folder = Path(name)
    return read_about(folder)[0].data.length if (folder / ABOUT).is_file() else None
