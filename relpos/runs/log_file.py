"""Reading log.jsonl, the log of a run: one JSON object per line."""

import json
from pathlib import Path

FILE = "log.jsonl"
LOSSES = ("loss", "heldout")


def read_log(out: Path) -> list[dict[str, float]]:
    """Read the log of a run. A line that was cut off when the process was killed is left out.

    Args:
        out: The run's folder.

    Returns:
        The entries, each with its step and tokens; an empty list if there is no log.

    Raises:
        ValueError: It is a folder, is not UTF-8, or has a line that is JSON but not an entry.
    """
    file = out / FILE
    try:
        lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else []
    except UnicodeDecodeError as error:
        raise _not_a_log(file, f"it is not UTF-8 at byte {error.start}") from None
    except IsADirectoryError:
        raise _not_a_log(file, "it is a folder") from None
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if not isinstance(entry, dict) or not all(_is_number(entry.get(key)) for key in ("step", "tokens")):
            raise _not_a_log(file, f"line {number} has no step and tokens")
        if not all(_is_number(value) for value in entry.values()):
            raise _not_a_log(file, f"line {number} has values that are not numbers")
        entries.append(entry)
    return entries


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _not_a_log(file: Path, reason: str) -> ValueError:
    return ValueError(
        f"{file} is not the log of a run: {reason}. Remove it: the run resumes without its earlier losses."
    )
