"""The options of `relpos.figures`. Imports nothing heavy: `relpos figures --help` prints them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from relpos.model_catalogue import PRESETS
from relpos.runs.settings import PRESET
from relpos.system.options import COUNT, POSITIVE, SEED, option

STEPS = 240  # per model; steps and not minutes, so that everyone gets the same picture


@dataclass(eq=False, repr=False)
class FigureOptions:
    """The options of `relpos.figures` and `relpos figures`."""

    out: str | Path = option("figures", "Folder to write to.", metavar="FOLDER")
    figure: Iterable[int] = option(
        (), "Number of a figure.", shown="4, 8, 10, 12, 13, 14 and 15; 5, 9 and 11 train longer", range=COUNT
    )
    _: KW_ONLY
    preset: str = option(PRESET, "Size of the models.", choices=tuple(PRESETS))
    runs: str | Path = option("runs", "Folder of the trained models; finished ones are reused.", metavar="FOLDER")
    minutes: float | None = option(None, "Train each model for this many minutes, instead of steps.", range=POSITIVE)
    steps: int | None = option(
        None, "Train each model for this many steps.", shown=f"{STEPS}; a finished model is kept", range=COUNT
    )
    workers: int | None = option(
        None,
        "Models trained at a time; the cores are divided among them.",
        shown="one per core for nano, else 1",
        range=COUNT,
    )
    seed: int = option(0, "Seed that chooses the window of held-out text.", range=SEED)
    settings: Mapping[str, Any] | None = option(None, "Further settings of the training, by dotted key.", command=False)
    say: Callable[[str], None] = option(print, "Called with sentences about the progress.", command=False)
