"""The error for an unknown name."""

import difflib
from collections.abc import Iterable


def unknown(kind: str, given: object, allowed: Iterable[str]) -> ValueError:
    """A ValueError that says what was given, suggests the nearest name and lists what is allowed."""
    known = sorted(allowed)
    near = difflib.get_close_matches(str(given).lower(), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {given!r}.{hint} Allowed: {', '.join(known) or 'none'}.")
