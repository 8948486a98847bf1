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
            help="An encoding's name (relpos ls), drawn untrained; or the folder of a run or checkpoint. Several share "
            "one profile.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Where to: .png, .pdf or .svg.  [default: WHAT.png]")] = None,
    show: Annotated[
        str | None,
        typer.Option(
            help="bias; scores, before the softmax; weights, after it; profile, value against distance.  "
            "[default: bias, or scores where there is none]"
        ),
    ] = None,
    layer: Annotated[str, typer.Option(help="last, all (a contact sheet), or a number; 1 is the first.")] = "last",
    head: Annotated[
        list[int] | None, typer.Option(help="A head; 1 is the first. May be repeated.  [default: all]")
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Number of tokens.  [default: 512, or what was trained]", min=1)
    ] = None,
    text: Annotated[str | None, typer.Option(help="What the model reads.  [default: held-out text]")] = None,
    text_file: Annotated[Path | None, typer.Option(help="A file with what the model reads.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Name the tokens on the axes (up to 64).")] = False,
    shared_scale: Annotated[bool, typer.Option("--shared-scale", help="One colour scale for all panels.")] = False,
    log: Annotated[bool, typer.Option("--log", help="A logarithmic distance axis, in a profile.")] = False,
    columns: Annotated[int, typer.Option(help="Width: one or two columns of a printed page.", min=1, max=2)] = 2,
    width: Annotated[float | None, typer.Option(help="Width in inches, instead of columns.", min=1, max=40)] = None,
    heads: Annotated[
        int | None, typer.Option(help="Number of heads of an untrained encoding.  [default: 12]", min=1)
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Size of a head of an untrained encoding.  [default: 64]", min=1)
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="An option of an untrained encoding, as key=value; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the window of held-out text; untrained, of the start values.")] = 0,
) -> None:
    """Draw what an encoding does: the heat map of every head, untrained or of a trained model.

    - relpos draw alibi
    - relpos draw runs/cable --text "To be, or not to be" --tokens
    - relpos draw runs/cable --layer all --shared-scale
    - relpos draw kerple_log --show profile --columns 1 --out kerple.pdf
    - relpos draw kerple_log fire t5 --show profile --log --head 1
    """
    from relpos.lab.data.documents import read_file
    from relpos.view.figures import FORMATS, WIDTHS
    from relpos.view.picture import draw as draw_picture

    path = out or Path(f"{'-'.join(Path(one).resolve().name for one in what)}.png")
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
        list[int] | None, typer.Option(help="A figure by its number; may be repeated.  [default: 8 10 12 13 14 15]")
    ] = None,
    preset: Annotated[str, typer.Option(help=f"Size of the models: {', '.join(PRESETS)}.")] = "nano",
    runs: Annotated[Path, typer.Option(help="Where the trained models are kept and found.")] = Path("runs"),
    minutes: Annotated[float | None, typer.Option(help="Train each model for so many minutes instead.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Train each model so many steps.  [default: 240, or as it is if it has finished]", min=1),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Models trained at once; the cores are divided among them.  [default: one per core for nano, else 1]",
            min=1,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the window of held-out text.")] = 0,
) -> None:
    """Make the paper's figures: train what is missing, draw, and put all on one page (index.html).

    Figure 12 (ALiBi) needs no training and is there at once.

    The others: 8 CABLE, 10 Kerple, 13 FIRE, 14 T5-bias (clipped), 15 RoPE.

    Models are kept in RUNS/figures-ENCODING-PRESET and used again.
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
        raise ValueError(f"{len(failed)} of the figures could not be made, see above; the others are in {out}.")


class Progress:
    """A line that says how much is done and how long the rest takes; none if all is done within two seconds.

    In a terminal the line replaces the one before; elsewhere there is a new one every `every` seconds.
    """

    def __init__(self, verb: str, stream: TextIO | None = None, first: float = 2.0, every: float = 10.0) -> None:
        from relpos.system.progress import LiveLine

        self.verb, self.stream = verb, stream or sys.stderr
        self.line = LiveLine(self.stream)
        self.begun = time.monotonic()
        self.next, self.every = self.begun + first, 0.1 if self.stream.isatty() else every

    def __call__(self, done: float) -> None:
        """Some share of the work is done: 1 is all of it."""
        from relpos.system.progress import clock_time

        now = time.monotonic()
        if done >= 1:
            self.line.clear()
        elif now >= self.next and done > 0:
            self.next = now + self.every
            self.line(f"{self.verb} {done:4.0%}  {clock_time((now - self.begun) * (1 - done) / done)} left")
