"""What several commands read and print in the same way."""

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def parse_options(pairs: list[str]) -> dict[str, object]:
    """An encoding's options, given as key=value."""
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
    """Lengths in tokens, with commas between them."""
    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise ValueError(f"lengths are whole numbers with commas between them, as in 512,1024, not {text!r}.") from None


def console() -> "Console":
    """Where tables are printed; wide where it is no terminal."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=160)
