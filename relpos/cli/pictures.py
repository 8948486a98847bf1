"""relpos draw and relpos figures."""

from pathlib import Path
from typing import Annotated

import typer

from relpos.cli.choices import (
    SHOWS,
    complete_encoding_or_folder,
    complete_layer,
    complete_preset,
    complete_show,
    metavar,
)
from relpos.cli.options import above_zero, check_seed, default, parse_options
from relpos.model_catalogue import PRESETS
from relpos.paper import defaults as paper_defaults
from relpos.pictures.defaults import COLUMNS, HEAD_DIM, HEADS, LENGTH, MOST_LABELS
from relpos.runs.defaults import PRESET
from relpos.system.progress import FractionLine

SHOWN, LOOKS, UNTRAINED = "What is shown", "How it looks", "An untrained encoding"  # groups of options in the help


def draw(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="WHAT...",
            help="The name of an encoding (relpos ls), drawn untrained; or a model: the folder of a run or checkpoint, "
            "a .gguf file, or a name on the hub. With --show profile, several are drawn together.",
            autocompletion=complete_encoding_or_folder,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A .png, .pdf or .svg file; or a .json, .npz or .safetensors file for the numbers alone.  "
            f"{default('WHAT.png')}",
        ),
    ] = None,
    numbers: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write the numbers behind the picture: every array to a .npz or .safetensors file, or the small "
            "ones to a .json file (docs/figures.md).",
        ),
    ] = None,
    show: Annotated[
        str | None,
        typer.Option(
            metavar=metavar(SHOWS),
            help="bias; scores, before the softmax; weights, after the softmax; profile, value against distance; mass, "
            "attention against distance, with the class of each head; position, the positional part of the scores.  "
            f"{default('bias, or scores if the encoding adds no bias')}",
            autocompletion=complete_show,
            rich_help_panel=SHOWN,
        ),
    ] = None,
    layer: Annotated[
        str,
        typer.Option(
            metavar="last|all|N",
            help=f"Layer of a trained model; 1 is the first, all gives a contact sheet.  {default('last')}",
            show_default=False,
            autocompletion=complete_layer,
            rich_help_panel=SHOWN,
        ),
    ] = "last",
    head: Annotated[
        list[int] | None,
        typer.Option(
            help=f"Head to draw; 1 is the first. May be repeated.  {default('all')}", min=1, rich_help_panel=SHOWN
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help=f"Number of tokens.  {default(f'the trained length; {LENGTH} for an untrained encoding')}",
            min=1,
            rich_help_panel=SHOWN,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help=f"Text for the model to read.  {default('held-out text')}", rich_help_panel=SHOWN),
    ] = None,
    text_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with text for the model to read.", rich_help_panel=SHOWN)
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed that chooses the window of held-out text; for an untrained encoding, of its initial values.  "
            f"{default(0)}",
            callback=check_seed,
            show_default=False,
            rich_help_panel=SHOWN,
        ),
    ] = 0,
    bos: Annotated[
        bool,
        typer.Option(
            "--bos/--no-bos",
            help="Whether models that others trained see their special tokens, BOS or CLS and SEP, around each window: "
            f"docs/evaluation.md.  {default('--bos')}",
            show_default=False,
            rich_help_panel=SHOWN,
        ),
    ] = True,
    label_tokens: Annotated[
        bool,
        typer.Option(
            "--label-tokens", help=f"Name the tokens on the axes (at most {MOST_LABELS}).", rich_help_panel=LOOKS
        ),
    ] = False,
    shared_scale: Annotated[
        bool, typer.Option("--shared-scale", help="One colour scale for all panels.", rich_help_panel=LOOKS)
    ] = False,
    log: Annotated[
        bool,
        typer.Option(
            "--log", help="Logarithmic distance axis, for a profile, mass or position.", rich_help_panel=LOOKS
        ),
    ] = False,
    columns: Annotated[
        int,
        typer.Option(
            help=f"Width in columns of a printed page: 1 or 2.  {default(COLUMNS)}",
            min=1,
            max=2,
            show_default=False,
            rich_help_panel=LOOKS,
        ),
    ] = COLUMNS,
    width: Annotated[
        float | None,
        typer.Option(help="Width in inches, instead of --columns.", min=1, max=40, rich_help_panel=LOOKS),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help=f"Number of heads.  {default(HEADS)}", min=1, rich_help_panel=UNTRAINED)
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help=f"Size of each head.  {default(HEAD_DIM)}", min=1, rich_help_panel=UNTRAINED)
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="An option of the encoding. May be repeated.", rich_help_panel=UNTRAINED
        ),
    ] = None,
) -> None:
    """Draw what an encoding does: one heat map per head, untrained or of a trained model.

    - relpos draw alibi
    - relpos draw runs/cable --text "To be, or not to be" --label-tokens
    - relpos draw runs/cable --layer all --shared-scale
    - relpos draw kerple_log --show profile --columns 1 --out kerple.pdf
    - relpos draw kerple_log fire t5 --show profile --log --head 1
    - relpos draw runs/cable --layer all --show mass
    - relpos draw runs/cable --show weights --numbers weights.npz
    """
    from relpos.pictures.figures import WIDTHS
    from relpos.pictures.picture import draw as draw_picture
    from relpos.pictures.picture_checks import check_files
    from relpos.text.documents import read_file

    path = out or Path(f"{'-'.join(Path(each).resolve().name for each in what)}.png")
    check_files(path, numbers)  # before the work, not after it
    if text is not None and text_file is not None:
        raise ValueError("give --text or --text-file, not both.")
    if text_file is not None:
        text = next(read_file(text_file, "text")).text
    picture = draw_picture(
        what if len(what) > 1 else what[0],
        show=show,  # type: ignore[arg-type]  # draw refuses unknown words with a suggestion
        layer=int(layer) if layer.isdigit() else layer,  # type: ignore[arg-type]
        head=head or [],
        length=length,
        text=text,
        text_name="the text" if text_file is None else str(text_file),
        seed=seed,
        bos=bos,
        label_tokens=label_tokens,
        shared_scale=shared_scale,
        log=log,
        width=width or WIDTHS[columns],
        heads=heads,
        head_dim=head_dim,
        options=parse_options(option or []),
        progress=FractionLine("drawing").show,
    )
    typer.echo(f"{picture.save(path)}: {picture.caption}")
    if numbers is not None:
        typer.echo(f"{picture.save(numbers)}: the numbers behind it")


def figures(
    out: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help=f"Folder to write to.  {default(paper_defaults.OUT)}", show_default=False),
    ] = Path(paper_defaults.OUT),
    figure: Annotated[
        list[int] | None, typer.Option(help=f"Number of a figure. May be repeated.  {default('all')}", min=1)
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            metavar=metavar(PRESETS),
            help=f"Size of the models.  {default(PRESET)}",
            show_default=False,
            autocompletion=complete_preset,
        ),
    ] = PRESET,
    runs: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            help=f"Folder of the trained models; finished ones are reused.  {default(paper_defaults.RUNS)}",
            show_default=False,
        ),
    ] = Path(paper_defaults.RUNS),
    minutes: Annotated[
        float | None,
        typer.Option(help="Train each model for this many minutes, instead of --steps.", callback=above_zero),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Train each model for this many steps.  "
            f"{default(f'{paper_defaults.STEPS}; a finished model is kept')}",
            min=1,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Models trained at a time; the cores are divided among them.  "
            f"{default('one per core for nano, else 1')}",
            min=1,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help=f"Seed that chooses the window of held-out text.  {default(0)}",
            callback=check_seed,
            show_default=False,
        ),
    ] = 0,
) -> None:
    """Make the figures of the CABLE paper: train the missing models, draw, and put all on one page (index.html).

    Figure 12 (ALiBi) needs no training and is ready within seconds.

    The others: 8 CABLE, 10 Kerple, 13 FIRE, 14 T5-bias (clipped), 15 RoPE.

    The models are kept in RUNS/figures-ENCODING-PRESET.
    """
    from relpos.paper.figures import draw_figures

    failed = draw_figures(
        out,
        figure or [],
        preset=preset,
        runs=runs,
        seed=seed,
        minutes=minutes,
        steps=steps,
        workers=workers,
        say=typer.echo,
    )
    if failed:
        raise ValueError(f"{len(failed)} of the figures could not be made (see above); the others are in {out}.")
