"""`relpos.train` and its options. Imports nothing heavy before training begins: wrong settings are refused at once."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.encodings.registry import names
from relpos.runs.settings import Settings, load_settings, recipes, setting, settings_by_key
from relpos.system.options import option, takes

if TYPE_CHECKING:
    from relpos.runs.run import Run

MODEL, DATA, TRAINING, RUN = "Model", "Data", "Training", "Run"  # groups in the help


def task_names() -> list[str]:
    """The synthetic tasks."""
    from relpos.tasks import names as tasks  # imports numpy, which `relpos --help` does not need

    return tasks()


@dataclass(eq=False, repr=False)
class TrainOptions:
    """The options of `relpos.train` and `relpos train`. Those of None are settings with their default."""

    encoding: str | None = setting("model.encoding", metavar="NAME", complete=names, panel=MODEL)
    _: KW_ONLY
    options: Mapping[str, Any] | None = option(
        None, "Options of the encoding by name, as in scaling=yarn.", flag="--option", metavar="KEY=VALUE", panel=MODEL
    )
    from_model: str | Path | None = setting("model.start", flag="--from", metavar="MODEL", panel=MODEL)
    family: str | None = setting("model.family", panel=MODEL)
    preset: str | None = setting("model.preset", panel=MODEL)
    data: str | Path | None = setting("data.source", panel=DATA)
    task: str | None = setting("data.task", metavar="NAME", complete=task_names, panel=DATA)
    tokenizer: str | None = setting("data.tokenizer", panel=DATA)
    length: int | None = setting("data.length", panel=DATA)
    steps: int | None = setting("run.steps", panel=TRAINING)
    tokens: float | None = setting("run.tokens", panel=TRAINING)
    minutes: float | None = setting("run.minutes", panel=TRAINING)
    batch_size: int | None = setting("run.batch_size", panel=TRAINING)
    lr: float | None = setting("optimizer.lr", panel=TRAINING)
    seed: int | None = setting("run.seed", shown="0", panel=RUN)
    out: str | Path | None = setting("run.out", panel=RUN)
    config: str | Path | None = option(
        None,
        f"A YAML file with settings, or a recipe: {', '.join(recipes())} (as in the CABLE paper, except for the "
        "held-out part and the order of the text).",
        metavar="FILE|RECIPE",
        complete=recipes,
        panel=RUN,
    )
    overrides: Mapping[str, Any] | None = option(
        None,
        "Any other setting by its dotted key, as in optimizer.weight_decay=0. These win over the other options, and "
        "the other options over the file.",
        metavar="[KEY=VALUE]...",
        argument=True,
    )
    say: Callable[[str], None] = option(
        print, "Called with messages at the start and the end. The progress line is always printed.", command=False
    )

    def settings(self) -> Settings:
        """The settings: from the file, then the named options, then the overrides.

        Raises:
            ValueError: A setting is unknown or has a value that is not allowed.
            OSError: There is no such file.
        """
        of_encoding = {f"model.options.{name}": value for name, value in (self.options or {}).items()}
        flat = {**settings_by_key(self), **of_encoding, **(self.overrides or {})}
        return load_settings(None if self.config is None else str(self.config), flat)


@takes(TrainOptions)
def train(options: TrainOptions) -> "Run":
    """Train a model with a positional encoding; the same as the command `relpos train`.

    If interrupted, call it again to resume.

    Returns:
        The trained run: its model, tokenizer and settings, and its losses and times in `result`.

    Raises:
        ValueError: A setting is unknown or has a value that is not allowed, or the folder holds a run with other
            settings.
        OSError: The data cannot be read, or the folder cannot be written.

    Example:
        >>> run = relpos.train("cable", preset="nano", length=512, minutes=5, out="runs/cable")
        >>> run.result["heldout"]
    """
    settings = options.settings()
    from relpos.runs.run import open_run
    from relpos.training.training import train as train_model

    train_model(settings, options.say)
    assert settings.run.out is not None
    return open_run(settings.run.out)
