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

from relpos.encodings.registry import card, encoding, names, register

if TYPE_CHECKING:
    from relpos.attend import Cache as Cache
    from relpos.attend import attention as attention
    from relpos.attend import mass as mass
    from relpos.attend import scores as scores
    from relpos.comparison.compare import compare as compare
    from relpos.evaluation.evaluate import evaluate as evaluate
    from relpos.explorer.explore import explore as explore
    from relpos.forms.bias import Projected as Projected
    from relpos.forms.bias import RankOne as RankOne
    from relpos.forms.bias import Scaled as Scaled
    from relpos.forms.bias import Scored as Scored
    from relpos.forms.bias import Toeplitz as Toeplitz
    from relpos.forms.encoding import Encoding as Encoding
    from relpos.paper.figures import draw_figures as figures
    from relpos.pictures.picture import draw as draw
    from relpos.pretrained.transplant import transplant as transplant
    from relpos.pretrained.use import use as use
    from relpos.runs.run import open_run
    from relpos.system.executors import LocalExecutor as LocalExecutor
    from relpos.system.executors import Resources as Resources
    from relpos.system.ray import RayExecutor as RayExecutor
    from relpos.system.slurm import SlurmExecutor as SlurmExecutor
    from relpos.training.train import train as train

    open = open_run

__version__ = "0.1.0"
# What needs torch or more is imported on first use, so that `relpos --help` and `relpos ls` never wait for it.
_LAZY = {  # name: module, and its name there
    "Cache": ("relpos.attend", "Cache"),
    "Encoding": ("relpos.forms.encoding", "Encoding"),
    "LocalExecutor": ("relpos.system.executors", "LocalExecutor"),
    "Projected": ("relpos.forms.bias", "Projected"),
    "RankOne": ("relpos.forms.bias", "RankOne"),
    "RayExecutor": ("relpos.system.ray", "RayExecutor"),
    "Resources": ("relpos.system.executors", "Resources"),
    "Scaled": ("relpos.forms.bias", "Scaled"),
    "Scored": ("relpos.forms.bias", "Scored"),
    "SlurmExecutor": ("relpos.system.slurm", "SlurmExecutor"),
    "Toeplitz": ("relpos.forms.bias", "Toeplitz"),
    "attention": ("relpos.attend", "attention"),
    "compare": ("relpos.comparison.compare", "compare"),
    "draw": ("relpos.pictures.picture", "draw"),
    "evaluate": ("relpos.evaluation.evaluate", "evaluate"),
    "explore": ("relpos.explorer.explore", "explore"),
    "figures": ("relpos.paper.figures", "draw_figures"),
    "mass": ("relpos.attend", "mass"),
    "open": ("relpos.runs.run", "open_run"),
    "scores": ("relpos.attend", "scores"),
    "train": ("relpos.training.train", "train"),
    "transplant": ("relpos.pretrained.transplant", "transplant"),
    "use": ("relpos.pretrained.use", "use"),
}
__all__ = [  # without `open`: `from relpos import *` must not replace Python's own
    "Cache",
    "Encoding",
    "LocalExecutor",
    "Projected",
    "RankOne",
    "RayExecutor",
    "Resources",
    "Scaled",
    "Scored",
    "SlurmExecutor",
    "Toeplitz",
    "attention",
    "card",
    "compare",
    "draw",
    "encoding",
    "evaluate",
    "explore",
    "figures",
    "mass",
    "names",
    "register",
    "scores",
    "train",
    "transplant",
    "use",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'relpos' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    found = globals()[name] = getattr(importlib.import_module(module), attribute)  # looked up once
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "open", "__version__"])
