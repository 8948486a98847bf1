"""relpos draw and relpos figures."""

import sys
import time
from pathlib import Path
from typing import Annotated, TextIO

import typer

from relpos.commands.options import parse_options
from relpos.models.presets import PRESETS


def draw(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="WHAT...",
            help="An encoding's name (see relpos ls), drawn untrained, or the folder of a run or checkpoint. "
            "Several of them are drawn in one profile.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="File to write: .png, .pdf or .svg.  [default: WHAT.png]")] = None,
    show: Annotated[
        str | None,
        typer.Option(
            help="bias, scores (before the softmax), weights (after the softmax) or profile (value against distance).  "
            "[default: bias, or scores if the encoding adds no bias]"
        ),
    ] = None,
    layer: Annotated[str, typer.Option(help="last, all (a contact sheet), or a number from 1.")] = "last",
    head: Annotated[
        list[int] | None, typer.Option(help="Head to draw; 1 is the first. May be repeated.  [default: all]")
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Number of tokens.  [default: the trained length, or 512]", min=1)
    ] = None,
    text: Annotated[str | None, typer.Option(help="Text for the model to read.  [default: held-out text]")] = None,
    text_file: Annotated[Path | None, typer.Option(help="File with the text for the model to read.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Label the axes with the tokens (up to 64).")] = False,
    shared_scale: Annotated[bool, typer.Option("--shared-scale", help="One colour scale for all panels.")] = False,
    log: Annotated[bool, typer.Option("--log", help="Logarithmic distance axis in a profile.")] = False,
    columns: Annotated[int, typer.Option(help="Width in columns of a printed page: 1 or 2.", min=1, max=2)] = 2,
    width: Annotated[float | None, typer.Option(help="Width in inches, instead of columns.", min=1, max=40)] = None,
    heads: Annotated[
        int | None, typer.Option(help="Number of heads of an untrained encoding.  [default: 12]", min=1)
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Size of a head of an untrained encoding.  [default: 64]", min=1)
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Option of an untrained encoding, as key=value. May be repeated.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the window of held-out text, or of the start values of an untrained encoding.")
    ] = 0,
) -> None:
    """Draw heat maps of an encoding, one per head, untrained or in a trained model.

    - relpos draw alibi
    - relpos draw runs/cable --text "To be, or not to be" --tokens
    - relpos draw runs/cable --layer all --shared-scale
    - relpos draw kerple_log --show profile --columns 1 --out kerple.pdf
    - relpos draw kerple_log fire t5 --show profile --log --head 1
    """
    from relpos.lab.data.documents import read_file
    from relpos.view.figures import FORMATS, WIDTHS
    from relpos.view.picture import draw as draw_picture

    path = out or Path(f"{'-'.join(Path(item).resolve().name for item in what)}.png")
    if path.suffix.lower() not in FORMATS:  # before the work, not after it
        raise ValueError(f"cannot write a picture to {path.name!r}: the name must end in {', '.join(FORMATS)}.")
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
        tokens=tokens,
        shared_scale=shared_scale,
        log=log,
        width=width or WIDTHS[columns],
        heads=heads,
        head_dim=head_dim,
        options=parse_options(option or []),
        progress=Progress("drawing"),
    )
    typer.echo(f"{picture.save(path)}: {picture.caption}")


def figures(
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("figures"),
    figure: Annotated[
        list[int] | None, typer.Option(help="Number of a figure. May be repeated.  [default: 8 10 12 13 14 15]")
    ] = None,
    preset: Annotated[str, typer.Option(help=f"Size of the models: {', '.join(PRESETS)}.")] = "nano",
    runs: Annotated[Path, typer.Option(help="Folder of the trained models.")] = Path("runs"),
    minutes: Annotated[float | None, typer.Option(help="Training time of each model, instead of steps.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Training steps of each model.  [default: 240; a finished model is reused]", min=1),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Models trained at the same time; they share the cores.  [default: one per core for nano, else 1]",
            min=1,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the window of held-out text.")] = 0,
) -> None:
    """Make the figures of the CABLE paper: train missing models, draw, and write one page (index.html).

    Figure 12 (ALiBi) needs no training.

    The others: 8 CABLE, 10 Kerple, 13 FIRE, 14 T5-bias (clipped), 15 RoPE.

    Models are kept in RUNS/figures-ENCODING-PRESET and reused.
    """
    from relpos.lab.paper import draw_figures

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
        raise ValueError(f"{len(failed)} of the figures failed, for the reasons above; the others are in {out}.")


class Progress:
    """A line with the completed fraction and the remaining time; none if all is done within `first` seconds.

    A terminal shows one line that is updated; elsewhere a new line is printed every `every` seconds.
    """

    def __init__(self, verb: str, stream: TextIO | None = None, first: float = 2.0, every: float = 10.0) -> None:
        from relpos.system.progress import LiveLine

        self.verb, self.stream = verb, stream or sys.stderr
        self.line = LiveLine(self.stream)
        self.begun = time.monotonic()
        self.next, self.every = self.begun + first, 0.1 if self.stream.isatty() else every

    def __call__(self, done: float) -> None:
        """Show the completed fraction; 1 clears the line."""
        from relpos.system.progress import clock_time

        now = time.monotonic()
        if done >= 1:
            self.line.clear()
        elif now >= self.next and done > 0:
            self.next = now + self.every
            self.line(f"{self.verb} {done:4.0%}  {clock_time((now - self.begun) * (1 - done) / done)} left")
