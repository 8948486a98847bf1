"""The table of settings, from the dataclasses and comments of relpos/runs/settings.py."""

import ast
import inspect
import tokenize
from io import StringIO

from relpos.runs import defaults, settings

GROUPS = {
    "model": settings.ModelSettings,
    "data": settings.DataSettings,
    "optimizer": settings.OptimizerSettings,
    "run": settings.RunSettings,
}


def tables() -> str:
    """One table per group, in Markdown."""
    return "\n\n".join(table(group, cls) for group, cls in GROUPS.items())


def table(group: str, cls: type) -> str:
    """The settings of one group: name, type, default, meaning."""
    rows = [f"## {group}", "", "| setting | type | default | meaning |", "|---|---|---|---|"]
    for name, kind, default, meaning in fields(cls):
        rows.append(f"| `{group}.{name}` | {kind} | {default} | {meaning} |".replace("  ", " "))
    return "\n".join(rows)


def fields(cls: type) -> list[tuple[str, str, str, str]]:
    """The fields of a dataclass with the comments behind them."""
    source = inspect.getsource(cls)
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    rows = []
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            kind = ast.unparse(node.annotation).replace(" | None", "").replace("|", "\\|")
            rows.append((node.target.id, kind, default_text(node.value), comments.get(node.lineno, "")))
    return rows


def default_text(value: ast.expr) -> str:
    """A default as people read it."""
    text = ast.unparse(value)
    if text.startswith("defaults."):
        text = repr(getattr(defaults, text.removeprefix("defaults.")))
    if text.startswith("field("):
        return "empty"
    return "–" if text == "None" else f"`{text}`"
