"""relpos: the positional encodings of attention, exact, in one place.

import relpos
enc = relpos.encoding("kerple_log", heads=12, head_dim=64)
out = relpos.attention(q, k, v, position=enc)
enc.map(512)

run = relpos.train("cable", length=512, out="runs/cable")
relpos.evaluate(run, lengths=[512, 1024, 2048])
relpos.draw(run)
"""

import importlib
from typing import TYPE_CHECKING, Any

from relpos.encodings import registry
from relpos.encodings.registry import card, encoding, names

if TYPE_CHECKING:
    from relpos.attend import Cache, attention, mass, scores
    from relpos.checking.check import check
    from relpos.comparison.compare import compare
    from relpos.evaluation.evaluate import evaluate
    from relpos.explorer.explore import explore
    from relpos.forms.bias import Projected, RankOne, Scaled, Scored, Toeplitz
    from relpos.forms.encoding import Encoding
    from relpos.paper.figures import draw_figures as figures
    from relpos.pictures.draw import draw
    from relpos.pretrained.transplant import transplant
    from relpos.pretrained.use import use
    from relpos.runs.run import open_run
    from relpos.system.executors import LocalExecutor, Resources
    from relpos.system.ray import RayExecutor
    from relpos.system.slurm import SlurmExecutor
    from relpos.training.train import train

    open = open_run

__version__ = "0.1.0"
# What needs torch or more is imported on first use, so that `relpos --help` and `relpos ls` never wait for it.
_LAZY = {  # module: names
    "relpos.attend": ("Cache", "attention", "mass", "scores"),
    "relpos.checking.check": ("check",),
    "relpos.comparison.compare": ("compare",),
    "relpos.evaluation.evaluate": ("evaluate",),
    "relpos.explorer.explore": ("explore",),
    "relpos.forms.bias": ("Projected", "RankOne", "Scaled", "Scored", "Toeplitz"),
    "relpos.forms.encoding": ("Encoding",),
    "relpos.paper.figures": ("figures",),
    "relpos.pictures.draw": ("draw",),
    "relpos.pretrained.transplant": ("transplant",),
    "relpos.pretrained.use": ("use",),
    "relpos.runs.run": ("open",),
    "relpos.system.executors": ("LocalExecutor", "Resources"),
    "relpos.system.ray": ("RayExecutor",),
    "relpos.system.slurm": ("SlurmExecutor",),
    "relpos.training.train": ("train",),
}
_MODULES = {name: module for module, names_there in _LAZY.items() for name in names_there}
_RENAMED = {"figures": "draw_figures", "open": "open_run"}  # the names that they have in their modules
# Without `open`: `from relpos import *` must not replace Python's own.
__all__ = ["Cache", "Encoding", "LocalExecutor", "Projected", "RankOne", "RayExecutor", "Resources", "Scaled", "Scored"]
__all__ += [
    "SlurmExecutor",
    "Toeplitz",
    "attention",
    "card",
    "check",
    "compare",
    "draw",
    "encoding",
    "evaluate",
    "explore",
]
__all__ += ["figures", "mass", "names", "register", "scores", "train", "transplant", "use"]


def register(name: str | None = None, cls: "type[Encoding] | None" = None) -> None:
    """Add an encoding of your own; or, without arguments, register relpos with transformers.

    After `relpos.register()`, transformers opens the folders of our models by its Auto classes, and runs other models
    on our attention by name: `from_pretrained(…, attn_implementation="relpos")`. `import relpos.models` does the same.

    Args:
        name: The encoding's name, a Python identifier. From then on it works like the built-in ones.
        cls: A class derived from `relpos.Encoding`. It has `paper` and `formula` as strings, and every option of its
            `__init__` has a default value.

    Raises:
        TypeError: `cls` is not such a class.
        ValueError: The name is not an identifier, or is taken by another class.

    Example:
        >>> relpos.register("saturating", Saturating)
        >>> relpos.encoding("saturating", heads=12, head_dim=64)
        >>> relpos.register()
        >>> AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M", attn_implementation="relpos")
    """
    if name is None and cls is None:
        importlib.import_module("relpos.models")
    else:
        registry.register(name, cls)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'relpos' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), _RENAMED.get(name, name))
    globals()[name] = value  # looked up once
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "open", "__version__"])
