"""relpos draw and relpos figures."""

from pathlib import Path
from typing import Annotated

import typer

from relpos.commands.options import parse_options


def draw(
    what: Annotated[str, typer.Argument(metavar="NAME", help="An encoding's name (relpos ls), drawn untrained.")],
    out: Annotated[Path | None, typer.Option(help="Where to: .png, .pdf or .svg.  [default: NAME.png]")] = None,
    heads: Annotated[int, typer.Option(help="Number of heads.", min=1)] = 12,
    head_dim: Annotated[int, typer.Option(help="Size of a head.", min=1)] = 64,
    length: Annotated[int, typer.Option(help="Number of tokens.", min=1)] = 512,
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the encoding, as key=value; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the start values, and of the random input where one is read.")] = 0,
) -> None:
    """Draw the heat map of every head of an untrained encoding."""
    from relpos.view.figures import draw_heads, save
    from relpos.view.maps import untrained

    maps = untrained(what, heads, head_dim, length, seed, parse_options(option or []))
    path = save(draw_heads(maps.values, maps.caption), out or Path(f"{what}.png"))
    typer.echo(f"{path}: {maps.caption}")


def figures(
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("figures"),
) -> None:
    """Draw the paper's Figure 12 (ALiBi), and a learned encoding (Kerple) at its start."""
    from relpos.view.paper import draw_figures

    for path, caption in draw_figures(out):
        typer.echo(f"{path}: {caption}")
