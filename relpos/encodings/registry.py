"""Every encoding by name.

To add one: write its file, add its line to `FILES`. Nothing here imports torch: `relpos ls` reads an encoding's
card (its class's literals, its docstring, its `__init__`) from the source, without running it.
"""

import ast
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.errors import unknown

if TYPE_CHECKING:
    from relpos.encodings.encoding import Encoding

FILES = {  # name: file and class
    "alibi": ("alibi", "Alibi"),
    "cable": ("cable", "Cable"),
    "cable_nw": ("cable", "CableNoWeight"),
    "clipped": ("clipped", "Clipped"),
    "cope": ("cope", "Cope"),
    "dape": ("dape", "Dape"),
    "dapev2": ("dapev2", "DapeV2"),
    "fire": ("fire", "Fire"),
    "forgetting": ("forgetting", "Forgetting"),
    "kcable": ("kcable", "KernelCable"),
    "kerple_log": ("kerple", "KerpleLog"),
    "kerple_power": ("kerple", "KerplePower"),
    "learned": ("learned", "Learned"),
    "nope": ("nope", "Nope"),
    "rope": ("rope", "Rope"),
    "sandwich": ("sandwich", "Sandwich"),
    "sinusoidal": ("sinusoidal", "Sinusoidal"),
    "sum": ("sum", "Together"),
    "t5": ("t5", "T5"),
    "window": ("window", "Window"),
    "xpos": ("xpos", "Xpos"),
}
_registered: dict[str, type["Encoding"]] = {}

_CARD_FIELDS = ("place", "form", "learns", "directions", "paper", "formula")


@dataclass(frozen=True)
class Card:
    """What there is to know of an encoding before making one."""

    name: str
    summary: str
    place: str  # where it enters: embedding, query and key, score, nowhere
    form: str  # the form of its bias
    learns: str  # learned values per head, as a formula in the options; then "; by default …"
    directions: str  # causal, both, or "as its base"
    paper: str
    formula: str
    options: Mapping[str, tuple[str, str]]  # name: (default as written, meaning)

    @property
    def learns_by_default(self) -> str:
        """Learned values per head with the default options."""
        return self.learns.rpartition("; by default ")[2]


def names() -> list[str]:
    """Every encoding's name, sorted."""
    return sorted({*FILES, *_registered})


def register(name: str, cls: type["Encoding"]) -> None:
    """Add an encoding of your own under `name`; from then on it is like any other."""
    from relpos.encodings.encoding import Encoding

    if not (isinstance(cls, type) and issubclass(cls, Encoding)):
        raise TypeError(f"register needs a class derived from relpos.Encoding, not {cls!r}.")
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"an encoding's name must be a Python identifier, not {name!r}.")
    if name in FILES or _registered.get(name, cls) is not cls:
        raise ValueError(f"the name {name!r} is taken; choose another.")
    missing = [field for field in _CARD_FIELDS if not isinstance(getattr(cls, field, None), str)]
    if missing:
        raise TypeError(f"{cls.__name__} must say its {', '.join(missing)} as a string on the class.")
    _registered[name] = cls


def encoding_class(name: str) -> type["Encoding"]:
    """The class behind a name."""
    if name in _registered:
        return _registered[name]
    if name not in FILES:
        raise unknown("encoding", name, names())
    file, cls = FILES[name]
    found: type[Encoding] = getattr(importlib.import_module(f"relpos.encodings.{file}"), cls)
    return found


def encoding(name: str, heads: int, head_dim: int, **options: Any) -> "Encoding":
    """Make an encoding by name. Options are its own (`relpos ls NAME` lists them)."""
    cls = encoding_class(name)
    allowed = set(list(inspect.signature(cls.__init__).parameters)[1:]) - {"heads", "head_dim"}
    for option in options:
        if option not in allowed:
            raise unknown(f"option of {name}", option, allowed)
    return cls(heads, head_dim, **options)


def card(name: str) -> Card:
    """The card of an encoding; torch is not imported for it."""
    if name in _registered:
        return _card_of_class(name, _registered[name])
    if name not in FILES:
        raise unknown("encoding", name, names())
    file, cls = FILES[name]
    return _card_of_source(name, Path(__file__).with_name(f"{file}.py"), cls)


def _card_of_class(name: str, cls: type["Encoding"]) -> Card:
    meanings: Mapping[str, str] = cls.options
    signature = list(inspect.signature(cls.__init__).parameters.values())[3:]
    options = {p.name: (repr(p.default), meanings.get(p.name, "")) for p in signature}
    fields = {field: str(getattr(cls, field)) for field in _CARD_FIELDS}
    return Card(name=name, summary=_first_line(cls.__doc__), options=options, **fields)


def _card_of_source(name: str, path: Path, cls: str) -> Card:
    literals: dict[str, Any] = {}
    init: ast.FunctionDef | None = None
    lineage = _lineage(path, cls)
    for node in lineage:  # base first, so that a derived class overrides
        for item in node.body:
            if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
                literals[item.targets[0].id] = ast.literal_eval(item.value)
            elif isinstance(item, ast.FunctionDef) and item.name == "__init__":
                init = item
    meanings = literals.get("options", {})
    options = {name: (default, meanings.get(name, "")) for name, default in _defaults(init)}
    fields = {field: literals[field] for field in _CARD_FIELDS}
    return Card(name=name, summary=_first_line(ast.get_docstring(lineage[-1])), options=options, **fields)


def _lineage(path: Path, cls: str) -> list[ast.ClassDef]:
    """The class and those it derives from, in this file or another encoding's, base first."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    homes = {node.name: path for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("relpos.encodings."):
            homes |= {alias.name: path.with_name(f"{node.module}.py".split(".", 2)[2]) for alias in node.names}
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls)
    parents = [base.id for base in found.bases if isinstance(base, ast.Name) and base.id in homes]
    return [ancestor for parent in parents for ancestor in _lineage(homes[parent], parent)] + [found]


def _defaults(init: ast.FunctionDef | None) -> list[tuple[str, str]]:
    if init is None:
        return []
    return [
        (arg.arg, ast.unparse(default) if default is not None else "required")
        for arg, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)
    ]


def _first_line(docstring: str | None) -> str:
    return (docstring or "").strip().split("\n", 1)[0]
