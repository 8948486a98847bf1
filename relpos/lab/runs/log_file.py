"""Reading the log of a run: one JSON object per line, in log.jsonl."""

import json
from pathlib import Path

FILE = "log.jsonl"
LOSSES = ("loss", "heldout")


def read_log(out: Path) -> list[dict[str, float]]:
    """The entries of a run's log; a line cut short by a kill is left out.

    Raises:
        ValueError: the file is no log: it has a line that is JSON but no entry, or is not UTF-8.
    """
    file = out / FILE
    try:
        lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else []
    except UnicodeDecodeError as error:
        raise _no_log(file, f"it is not UTF-8 at byte {error.start}") from None
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if not isinstance(entry, dict) or not all(_is_number(entry.get(key)) for key in ("step", "tokens")):
            raise _no_log(file, f"line {number} has no step and tokens")
        if not all(_is_number(value) for value in entry.values()):
            raise _no_log(file, f"line {number} has values that are not numbers")
        entries.append(entry)
    return entries


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _no_log(file: Path, reason: str) -> ValueError:
    return ValueError(f"{file} is no log of a run: {reason}. Remove it: the run resumes without its earlier losses.")
