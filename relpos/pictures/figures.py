"""Figures as files: the widths and formats of a printed page, written with the same bytes for the same figure."""

import io
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from relpos.system.files import write_bytes

FORMATS = (".png", ".pdf", ".svg")
WIDTHS = {1: 3.33, 2: 7.0}  # inches of one and of two columns of a printed page
SAVED: Any = {"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "relpos"}  # text stays text, fonts embedded


def write(figure: Figure, suffix: str) -> bytes:
    """Render a figure.

    Args:
        figure: The figure.
        suffix: .png, .pdf or .svg.

    Returns:
        The contents of the file: the same bytes for the same figure.

    Raises:
        ValueError: If the suffix is another one.
    """
    if suffix.lower() not in FORMATS:
        raise ValueError(f"cannot write a picture as {suffix or 'nothing'}: the name must end in {', '.join(FORMATS)}.")
    data = io.BytesIO()
    dates: dict[str, Any] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    with mpl.rc_context(SAVED):
        figure.savefig(data, format=suffix[1:].lower(), metadata=dates.get(suffix.lower(), {}), dpi=200)
    return data.getvalue()


def save(figure: Figure, path: Path) -> Path:
    """Write a figure to a .png, .pdf or .svg file, creating its folder.

    Args:
        figure: The figure.
        path: The file; its suffix is the format.

    Returns:
        The path.

    Raises:
        ValueError: If the suffix is not .png, .pdf or .svg.
    """
    data = write(figure, path.suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, data)
    return path
