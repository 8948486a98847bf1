"""Parsing, help texts and printing that several commands share."""

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def default(value: object, task: object = None) -> str:
    """A default as the help shows it, with that of a task if it differs."""
    return f"[default: {value}]" if task is None else f"[default: {value}; {task} for a task]"


def parse_options(pairs: list[str]) -> dict[str, object]:
    """Options of an encoding, written as key=value."""
    options: dict[str, object] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--option takes key=value, not {pair!r}.")
        try:
            options[key] = json.loads(text)  # numbers, true and false, lists, dictionaries
        except json.JSONDecodeError:
            options[key] = text
    return options


def parse_lengths(text: str) -> list[int]:
    """Lengths in tokens, separated by commas."""
    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise ValueError(f"lengths are whole numbers separated by commas, as in 512,1024, not {text!r}.") from None


def parse_names(text: str | None) -> list[str] | None:
    """Names separated by commas; None if there are none."""
    return [word.strip() for word in (text or "").split(",") if word.strip()] or None


def console() -> "Console":
    """The console that tables are printed to; wide if the output is not a terminal."""
    from rich.console import Console

    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=160)
