"""The rooms of the package have an order, and every import points downward: to the same room or to one before it."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "relpos"
ROOMS = [  # from the lowest to the highest
    "system",
    "forms",
    "encodings",
    "attend",
    "model_catalogue",
    "models",
    "pretrained",
    "text",
    "tasks",
    "runs",
    "maps",
    "pictures",
    "explorer",
    "training",
    "evaluation",
    "checking",
    "comparison",
    "paper",
    "cli",
    "__main__",  # starts the command
]


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}
del FILES["relpos"]  # relpos/__init__.py offers names of every room lazily


def room(module: str) -> int:
    """The place of a module's room in the order."""
    name = module.split(".")[1]
    assert name in ROOMS, f"{module} is in no room: add its room to ROOMS, in its place"
    return ROOMS.index(name)


def upward(module: str, source: str) -> list[str]:
    """The imports of a module, in functions and below TYPE_CHECKING too, that point to a higher room.

    Relative imports count too, and the package itself, which offers all rooms. Every room may ask for its version.
    """
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names = {alias.name for alias in node.names} - {"__version__"}
            imported |= {f"relpos.{name}" for name in names} if base == "relpos" else {base}
    ours = {name for name in imported if name.split(".")[0] in ("relpos", "")}
    return sorted(name for name in ours if not name.startswith("relpos.") or room(name) > room(module))


@pytest.mark.parametrize("module", FILES)
def test_imports_point_downward(module):
    assert upward(module, FILES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("from relpos.training.training import train", 1),
        ("from relpos.training import training", 1),
        ("from relpos import training", 1),
        ("import relpos.training.training", 1),
        ("from ..training import training", 1),
        ("def f():\n    from relpos.training.training import train", 1),
        ("if TYPE_CHECKING:\n    from relpos.training.training import train", 1),
        ("import relpos", 1),
        ("from relpos.runs.run import Run", 0),
        ("from relpos import __version__", 0),
    ],
)
def test_an_upward_import_is_noticed_wherever_it_is(line, count):
    assert len(upward("relpos.maps.map", line)) == count
