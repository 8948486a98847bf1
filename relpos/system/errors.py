"""Errors that any function may raise: for an unknown name, and for an empty string."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path


def unknown(kind: str, given: object, allowed: Iterable[str]) -> ValueError:
    """A ValueError that says what was given, suggests the nearest name and lists what is allowed."""
    known = sorted(allowed)
    near = nearest(str(given), known)
    hint = f" Did you mean {near!r}?" if near else ""
    return ValueError(f"unknown {kind} {given!r}.{hint} Allowed: {', '.join(known) or 'none'}.")


def missing(path: Path) -> FileNotFoundError:
    """A FileNotFoundError that suggests what lies beside a path under the nearest name."""
    near = nearest(path.name, [x.name for x in path.parent.iterdir()]) if path.parent.is_dir() else None
    hint = f" Did you mean {path.parent / near}?" if near else ""
    return FileNotFoundError(f"there is no {'file' if path.suffix == '.gguf' else 'folder'} {path}.{hint}")


def nearest(given: str, known: Iterable[str]) -> str | None:
    """The name that was probably meant; None if none is near."""
    return next(iter(difflib.get_close_matches(given.lower(), sorted(known), n=1)), None)


def check_not_empty(name: str, value: object) -> None:
    """Refuse an empty string, also inside a list or a dictionary.

    An empty string is never a value that someone chose: it would mean the default, or as a path the current folder.
    """
    if isinstance(value, str) and not value.strip():
        raise ValueError(f"{name} is empty (an unset shell variable?): give a value, or leave it out.")
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_not_empty(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for item in value:
            check_not_empty(name, item)
