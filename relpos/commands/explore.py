"""relpos explore."""

from pathlib import Path
from typing import Annotated

import typer

from relpos.commands.choices import complete_encoding_or_folder
from relpos.commands.options import default

SERVER = "The server"  # a group of options in the help


def explore(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WHAT]...",
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
    from relpos.view.explorer.explore import open_subjects
    from relpos.view.explorer.server import Server

    server = Server(open_subjects(what or [], length), host, port)
    if server.moved is not None:
        typer.echo(f"Port {server.moved} is taken; using {server.port}.")

    def ready() -> None:
        typer.echo(f"The explorer is at {server.url} (Ctrl-C stops it)")
        if not no_browser:
            server.open_browser()

    server.run(ready)
