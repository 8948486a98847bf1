"""relpos explore."""

from pathlib import Path
from typing import Annotated

import typer

from relpos.cli.choices import complete_encoding_or_folder
from relpos.cli.options import default

SERVER = "The server"  # a group of options in the help


def explore(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WHAT",
            help="The name of an encoding (relpos ls), or a model: the folder of a run or checkpoint, a .gguf file, or "
            "a name on the hub. Several are compared. With none, the pages of all encodings.",
            autocompletion=complete_encoding_or_folder,
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help=f"Number of tokens at first.  {default('the trained length; 512 for an encoding')}", min=1, max=65536
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"File with text for the models to read.  {default('held-out text')}"),
    ] = None,
    bos: Annotated[
        bool,
        typer.Option(
            "--bos/--no-bos",
            help="Whether models that others trained see their special tokens, BOS or CLS and SEP, around each window: "
            f"docs/evaluation.md.  {default('--bos')}",
            show_default=False,
        ),
    ] = True,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write one self-contained .html file instead, which needs no server."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            help=f"Port; the next free one if it is taken.  {default(8123)}",
            min=0,
            max=65535,
            rich_help_panel=SERVER,
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. Any other than this machine's own makes a token, which is part of the printed "
            f"URL.  {default('127.0.0.1')}",
            show_default=False,
            rich_help_panel=SERVER,
        ),
    ] = "127.0.0.1",
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Print the address, and open no browser.", rich_help_panel=SERVER)
    ] = False,
) -> None:
    """Look into every layer and head in the browser, at any length; for an encoding, move its parameters.

    - relpos explore
    - relpos explore kerple_log alibi
    - relpos explore runs/cable --length 2048
    - relpos explore runs/cable --export cable.html
    """
    from relpos.explorer.explore import explore as open_exploration
    from relpos.system.progress import FractionLine
    from relpos.text.documents import read_file

    if export is not None and not what:
        raise ValueError("nothing to export: name an encoding or a model.")
    if export is not None and export.suffix.lower() not in (".html", ".htm"):  # before the work, not after it
        raise ValueError(f"cannot export to {export.name!r}: the name must end in .html.")
    words = None if text is None else next(read_file(text, "text")).text
    exploration = open_exploration(what or [], length=length, text=words, bos=bos)
    if export is None:
        exploration.serve(host, port, not no_browser, typer.echo)
        return
    file = exploration.save(export, FractionLine("exporting").show)
    typer.echo(f"{file}: {file.stat().st_size / 1e6:.1f} MB, one page that needs no server and no network")
