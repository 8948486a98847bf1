"""The choices of options: how the help shows them, and how the shell completes them. Imports nothing heavy."""

from collections.abc import Iterable
from pathlib import Path

import typer

from relpos.encodings.registry import names
from relpos.evaluation.defaults import PROTOCOLS, ROPE_SCALINGS, SPLITS
from relpos.model_catalogue import FAMILIES, PRESETS

RECIPES = sorted(file.stem for file in Path(__file__).parents[1].glob("runs/recipes/*.yaml"))
SHOWS = ("bias", "scores", "weights", "profile", "mass", "position")


def metavar(choices: Iterable[str]) -> str:
    """Choices as the help shows them in place of TEXT."""
    return "|".join(choices)


def complete_encoding(incomplete: str) -> list[str]:
    """Encodings by name."""
    return _beginning(names(), incomplete)


def complete_encoding_or_task(ctx: typer.Context, incomplete: str) -> list[str]:
    """Encodings by name, or tasks after --tasks."""
    return complete_task(incomplete) if ctx.params.get("tasks") else complete_encoding(incomplete)


def complete_encoding_or_folder(incomplete: str) -> list[str]:
    """Encodings by name, and folders."""
    parent, slash, last = incomplete.rpartition("/")
    folders = sorted(folder.name for folder in Path(f"{parent}{slash}" or ".").glob("[!.]*/") if folder.is_dir())
    return [*complete_encoding(incomplete), *(f"{parent}{slash}{name}/" for name in _beginning(folders, last))]


def complete_encodings(incomplete: str) -> list[str]:
    """Encodings separated by commas; the last one is completed."""
    return _last_of_list(names(), incomplete)


def complete_rope_scalings(incomplete: str) -> list[str]:
    """Scalings of RoPE separated by commas; the last one is completed."""
    return _last_of_list(ROPE_SCALINGS, incomplete)


def complete_family(incomplete: str) -> list[str]:
    """Families of models."""
    return _beginning(FAMILIES, incomplete)


def complete_preset(incomplete: str) -> list[str]:
    """Sizes of models."""
    return _beginning(PRESETS, incomplete)


def complete_protocol(incomplete: str) -> list[str]:
    """Protocols of evaluation."""
    return _beginning(PROTOCOLS, incomplete)


def complete_split(incomplete: str) -> list[str]:
    """Splits of data."""
    return _beginning(SPLITS, incomplete)


def complete_task(incomplete: str) -> list[str]:
    """Synthetic tasks."""
    from relpos.tasks.registry import names as task_names  # imports numpy, which `relpos --help` does not need

    return _beginning(task_names(), incomplete)


def complete_config(incomplete: str) -> list[str]:
    """Recipes; a file is allowed too."""
    return _beginning(RECIPES, incomplete)


def complete_show(incomplete: str) -> list[str]:
    """Kinds of pictures."""
    return _beginning(SHOWS, incomplete)


def complete_layer(incomplete: str) -> list[str]:
    """Words for layers; a number is allowed too."""
    return _beginning(("last", "all"), incomplete)


def _beginning(choices: Iterable[str], incomplete: str) -> list[str]:
    return [choice for choice in choices if choice.startswith(incomplete)]


def _last_of_list(choices: Iterable[str], incomplete: str) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{choice}" for choice in _beginning(choices, last)]
