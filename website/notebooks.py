"""Notebooks: run, and shown as pages. They are committed without outputs; `make docs` runs them."""

import ast
import contextlib
import hashlib
import io
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from website.repository import ROOT

FOLDER = ROOT / "notebooks"
KEPT = ROOT / "build" / "docs" / "notebooks"


@dataclass
class Cell:
    """A cell with what it printed and showed."""

    kind: str  # code or markdown
    source: str
    text: str = ""
    pictures: list[bytes] = field(default_factory=list)  # PNG


def cells(notebook: Path) -> list[Cell]:
    """The cells of a notebook, not run."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    return [Cell(cell["cell_type"], "".join(cell["source"])) for cell in content["cells"]]


def run(notebook: Path, folder: Path) -> tuple[list[Cell], dict[str, Any]]:
    """Run the cells of a notebook in order, in a folder.

    Returns:
        The cells with their outputs, and the names that they have defined.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    result = cells(notebook)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(folder):
        for cell in result:
            if cell.kind == "code":
                run_cell(cell, names, notebook.name)
    return result, names


def run_cell(cell: Cell, names: dict[str, Any], file: str) -> None:
    """Run one cell; its last line, if it is an expression, is shown as a notebook shows it."""
    tree = ast.parse(cell.source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        exec(compile(tree, file, "exec"), names)
        value = eval(compile(ast.Expression(last.value), file, "eval"), names) if isinstance(last, ast.Expr) else None
    cell.text = printed.getvalue()
    picture = getattr(value, "_repr_png_", None)
    if picture is not None:
        cell.pictures.append(picture())
    elif value is not None:
        cell.text += repr(value)


def page(notebook: Path) -> Path:
    """The folder with a notebook as a page: page.md and its pictures. It is run if that has not been done yet."""
    files = [notebook, *sorted((ROOT / "relpos").rglob("*.py"))]
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]
    folder = KEPT / f"{notebook.stem}-{digest}"
    if not (folder / "page.md").exists():
        done, _ = run(notebook, folder / "work")
        lines = []
        for number, cell in enumerate(done):
            lines.append(cell.source if cell.kind == "markdown" else f"```python\n{cell.source}\n```")
            if cell.text.strip():
                lines.append(f"```text\n{cell.text.rstrip()}\n```")
            for place, png in enumerate(cell.pictures):
                picture = f"{notebook.stem}-{number}-{place}.png"
                (folder / picture).write_bytes(png)
                lines.append(f"![What the cell above draws]({picture})")
        link = f"This page is the notebook [`notebooks/{notebook.name}`]({notebook.name}), run by `make docs`."
        lines.insert(1, link)
        (folder / "page.md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return folder


def notebooks() -> list[Path]:
    """All notebooks."""
    return sorted(path for path in FOLDER.glob("*.ipynb") if not os.path.basename(path).startswith("."))
