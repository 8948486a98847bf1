"""Parsing, help texts and printing that several commands share."""

import json
import math
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from relpos.system.errors import check_not_empty

if TYPE_CHECKING:
    from rich.console import Console

LEAST_LENGTH = 2  # tokens: one predicts the next
MOST_SEED = 2**32 - 1  # of numpy's generator, which training seeds too


class Command(TyperCommand):
    """A command whose options and arguments refuse empty strings, and numbers that are not finite."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Check the text of all options before it is converted: as a path, an empty text is the current folder."""
        if not ctx.resilient_parsing:  # the shell completes a line that is not finished
            texts, _, _ = self.make_parser(ctx).parse_args(args=list(args))
            for parameter in self.params:
                check_not_empty(_written(parameter), texts.get(parameter.name))
        rest = super().parse_args(ctx, args)
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{_written(parameter)} must be a finite number, not {value}.")
        return rest


def _written(parameter: Any) -> str:
    """An option or argument as it is written on the command line."""
    if parameter.param_type_name == "option":
        return str(parameter.opts[0])
    return str(parameter.metavar or parameter.name.upper()).strip("[].")


def above_zero(value: float | None) -> float | None:
    """Check an amount of which 0 is too little; typer adds the name of the option."""
    if value is not None and value <= 0:
        raise typer.BadParameter(f"{value:g} is not above 0.")
    return value


def default(value: object, task: object = None) -> str:
    """A default as the help shows it, with that of a task if it differs."""
    return f"[default: {value}]" if task is None else f"[default: {value}; {task} for a task]"


def check_seed(value: int | None) -> int | None:
    """Check a seed; typer adds the name of the option. In the help, its range would leave no room for the words."""
    if value is not None and not 0 <= value <= MOST_SEED:
        raise typer.BadParameter(f"{value} is not in the range 0 to {MOST_SEED}.")
    return value


def parse_options(pairs: list[str]) -> dict[str, object]:
    """Options of an encoding, written as key=value."""
    options: dict[str, object] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--option takes key=value, not {pair!r}.")
        check_not_empty(f"--option {key}", text)
        try:
            options[key] = json.loads(text)  # numbers, true and false, lists, dictionaries
        except json.JSONDecodeError:
            options[key] = text
    return options


def parse_lengths(text: str) -> list[int]:
    """Lengths in tokens, separated by commas: the value of --lengths."""
    words = [word for word in text.split(",") if word.strip()]
    if not words or not all(word.strip().isdecimal() and int(word) >= LEAST_LENGTH for word in words):
        raise ValueError(f"--lengths takes whole numbers of at least {LEAST_LENGTH}, as in 512,1024, not {text!r}.")
    return [int(word) for word in words]


def parse_names(option: str, text: str | None) -> list[str] | None:
    """Names separated by commas: the value of an option, or None if it is left out."""
    if text is None:
        return None
    names = [word.strip() for word in text.split(",") if word.strip()]
    if not names:
        raise ValueError(f"{option} takes names separated by commas, not {text!r}.")
    return names


def console() -> "Console":
    """The console that tables are printed to; wide if the output is not a terminal."""
    from rich.console import Console

    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=160)
