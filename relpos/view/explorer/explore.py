"""`relpos.explore`: the explorer from Python."""

from collections.abc import Sequence
from pathlib import Path

from relpos.encodings.registry import names
from relpos.view.explorer.subjects import EncodingSubject, Subject


def open_subjects(what: Sequence[str | Path], length: int | None = None) -> list[Subject]:
    """The subjects of the explorer.

    Args:
        what: Names of encodings.
        length: Tokens by default.

    Raises:
        ValueError: A name is unknown.
    """
    subjects: list[Subject] = []
    for item in what:
        if item in names():
            subjects.append(EncodingSubject(str(len(subjects)), str(item), length))
            continue
        raise ValueError(f"{item} is not an encoding.")
    return subjects
