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
    "comparison",
    "paper",
    "cli",
]
EXEMPT = {"relpos"}  # relpos/__init__.py offers names of every room lazily


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def imports(module: str, source: str) -> set[str]:
    """The modules of relpos that a module imports anywhere, in functions and below TYPE_CHECKING too.

    `from relpos import __version__` does not count: every room may ask for the version.
    """
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # relative
                package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            # `from package import module` imports the module; other names come from the package itself.
            names = {f"{base}.{alias.name}" for alias in node.names}
            imported |= {name if name in FILES else base for name in names - {"relpos.__version__"}}
    return {name for name in imported if name.split(".")[0] == "relpos"}


def room(module: str) -> int:
    """The place of a module's room in the order."""
    inside = module.removeprefix("relpos.")
    rooms = [place for place, name in enumerate(ROOMS) if inside == name or inside.startswith(f"{name}.")]
    assert rooms, f"{module} is in no room: add its room to ROOMS, in its place"
    return rooms[0]


def upward(module: str, source: str) -> list[str]:
    """The imports of a module that point to a higher room, or to the package, which offers all rooms."""
    return [name for name in sorted(imports(module, source)) if (name in EXEMPT or room(name) > room(module))]


@pytest.mark.parametrize("module", [module for module in FILES if module not in EXEMPT])
def test_imports_point_downward(module):
    assert upward(module, FILES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "from relpos.training.training import train",
        "from relpos.training import training",
        "import relpos.training.training",
        "from ..training import training",
        "def f():\n    from relpos.training.training import train",
        "if TYPE_CHECKING:\n    from relpos.training.training import train",
        "import relpos",
    ],
)
def test_an_upward_import_is_noticed_wherever_it_is(line):
    assert len(upward("relpos.maps.map", line)) == 1


def test_a_downward_import_is_allowed():
    for line in ("from relpos.runs.run import Run", "from ..runs import run", "from . import cells"):
        assert imports("relpos.maps.map", line)
        assert upward("relpos.maps.map", line) == []
    assert upward("relpos.system.versions", "from relpos import __version__") == []
