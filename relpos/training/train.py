"""`relpos.train` and its options. Imports nothing heavy before training begins: wrong settings are refused at once."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.encodings.registry import names
from relpos.runs.settings import Settings, load_settings, recipes, setting, settings_by_key
from relpos.system.options import option, takes

if TYPE_CHECKING:
    from relpos.runs.run import Run

MODEL, RUN = "Model", "Run"  # groups in the help
of_model, of_data, of_training, of_run = (partial(setting, panel=panel) for panel in (MODEL, "Data", "Training", RUN))


def task_names() -> list[str]:
    """The synthetic tasks."""
    from relpos.tasks import names as tasks  # imports numpy, which `relpos --help` does not need

    return tasks()


@dataclass(eq=False, repr=False)
class TrainOptions:
    """The options of `relpos.train` and `relpos train`. Those of None are settings with their default."""

    encoding: str | None = of_model("model.encoding", metavar="NAME", complete=names)
    _: KW_ONLY
    options: Mapping[str, Any] | None = option(
        None, "Options of the encoding by name, as in scaling=yarn.", flag="--option", metavar="KEY=VALUE", panel=MODEL
    )
    from_model: str | Path | None = of_model("model.start", flag="--from", metavar="MODEL")
    family: str | None = of_model("model.family")
    preset: str | None = of_model("model.preset")
    data: str | Path | None = of_data("data.source")
    task: str | None = of_data("data.task", metavar="NAME", complete=task_names)
    tokenizer: str | None = of_data("data.tokenizer")
    length: int | None = of_data("data.length")
    steps: int | None = of_training("run.steps")
    tokens: float | None = of_training("run.tokens")
    minutes: float | None = of_training("run.minutes")
    batch_size: int | None = of_training("run.batch_size")
    lr: float | None = of_training("optimizer.lr")
    seed: int | None = of_run("run.seed", shown="0")
    out: str | Path | None = of_run("run.out")
    config: str | Path | None = option(
        None,
        f"A YAML file with settings, or a recipe: {', '.join(recipes())} (as the code of the CABLE "
        "paper: docs/paper.md).",
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
    verbose: bool = option(False, "Print all settings, as in run.yaml, not one line of them.", panel=RUN)
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

    train_model(settings, options.say, options.verbose)
    assert settings.run.out is not None
    return open_run(settings.run.out)
