"""Commands made from options dataclasses (relpos/system/options.py): flags, help, completion and parsing."""

import dataclasses
import inspect
import json
import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from relpos.encodings.registry import names
from relpos.runs.settings import MOST_STEPS, parse_overrides
from relpos.system.errors import check_not_empty
from relpos.system.options import Option, default_words, kinds_of, options_of

Values = dict[str, Any]  # the options that were given, by name
LISTS = (Sequence, Iterable, list, tuple, Mapping)


class Command(TyperCommand):
    """A command whose options and arguments refuse empty strings, and numbers that are not finite.

    Those of `command` are made when they are first asked for: `relpos --help` does not show them.
    """

    _params: list[Any]

    @property
    def params(self) -> list[Any]:
        """The options and arguments."""
        sign = getattr(inspect.unwrap(self.callback), "sign", None) if self.callback else None
        if not self._params and sign is not None:
            alone = typer.Typer(add_completion=False)
            alone.command()(sign())
            made = typer.main.get_command(alone)
            self._params, self.callback = made.params, made.callback
        return self._params

    @params.setter
    def params(self, params: list[Any]) -> None:
        self._params = params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Check the text of all options before it is converted: as a path, an empty text is the current folder."""
        if not ctx.resilient_parsing:  # the shell completes a line that is not finished
            texts, _, _ = self.make_parser(ctx).parse_args(args=list(args))
            for parameter in self.params:
                check_not_empty(_written(parameter), texts.get(parameter.name))
        rest = super().parse_args(ctx, args)
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{_written(parameter)} must be a finite number, not {value}.")
        return rest


def _written(parameter: Any) -> str:
    """An option or argument as it is written on the command line."""
    if parameter.param_type_name == "option":
        return str(parameter.opts[0])
    return str(parameter.metavar or parameter.name.upper()).strip("[].")


def command(*classes: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command from a function and its options dataclasses.

    The function is called with one dictionary per class: the options that were given, by field, parsed. Its docstring
    is the help.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def run(**texts: Any) -> None:
            function(*(parsed_options(cls, texts) for cls in classes))

        def sign() -> Callable[..., None]:
            """Give the command the parameters from which typer makes its options."""
            parameters = [parameter.signature() for cls in classes for parameter in _parameters(cls)]
            run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
            run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
            return run

        run.__doc__, run.__name__, run.__annotations__ = function.__doc__, function.__name__, {}
        run.__signature__, run.sign = inspect.Signature(), sign  # type: ignore[attr-defined]
        return run

    return decorate


def parsed_options(cls: Any, texts: Mapping[str, Any]) -> Values:
    """The options of a dataclass that were given on the command line, parsed."""
    given = {parameter: texts.get(parameter.field.name) for parameter in _parameters(cls)}
    values = {
        parameter.field.name: parameter.parse(text) for parameter, text in given.items() if text not in (None, [])
    }
    return {name: value for name, value in values.items() if value is not None}


class _Parameter:
    """One option of a command: its flag, what typer converts its text to, and what we make of that."""

    def __init__(self, field: "dataclasses.Field[Any]", about: Option) -> None:
        self.field, self.about, self.kinds = field, about, kinds_of(field.type)
        self.several = any(kind in LISTS for kind in self.kinds)
        self.commas = "," in about.metavar  # between several values
        self.repeated = about.argument or (self.several and not self.commas)
        name = field.name.replace("_", "-")
        self.flag = about.flag or (f"--{name}/--no-{name}" if field.default is True else f"--{name}")

    def signature(self) -> inspect.Parameter:
        field, about = self.field, self.about
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        words = default_words(field) or (f"--{field.name}" if field.default is True and not about.flag else "")
        shared: Values = {
            "help": about.meaning.replace("`", "")
            + (" May be repeated." if self.repeated and not about.argument else "")
            + (f"  [default: {words}]" if words else ""),
            "metavar": about.metavar or "|".join(about.choices) or None,
            "rich_help_panel": about.panel or None,
            "autocompletion": self._completion(),
        }
        info: Any = (
            typer.Argument(**shared)
            if about.argument
            else typer.Option(self.flag, show_default=False, **shared, **self._limits())
        )
        hint: Any = Annotated[self._kind() if required else self._kind() | None, info]
        default = inspect.Parameter.empty if required else None
        return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)

    def _kind(self) -> Any:
        if self.repeated:
            return list[int] if int in typing.get_args(self.field.type) else list[str]
        if bool in self.kinds:
            return bool
        if self.several or any(kind not in (int, float, type(None)) for kind in self.kinds):
            return str
        return float if float in self.kinds else int

    def _limits(self) -> Values:
        """How typer checks a number. Ranges that typer does not have, or would show too wide, are a callback."""
        allowed = self.about.range
        if allowed is None or self.commas or self.about.choices:  # a number or a word is checked with the others
            return {}

        def check(value: float | None) -> float | None:
            if value is not None and not allowed.holds(value):
                raise typer.BadParameter(f"{value} is not {allowed}.")  # typer adds the name of the option
            return value

        if allowed.above or allowed.below < math.inf:
            return {"callback": check}
        most = None if allowed.most in (math.inf, MOST_STEPS) else int(allowed.most)  # the settings refuse more steps
        return {"min": int(allowed.least), "max": most}

    def parse(self, text: Any) -> Any:
        """The value from the text, or from the texts of a repeated option; None if it is the default."""
        if self.kinds == (bool,) and (self.about.flag or self.field.default is False):
            return not self.field.default if text else None  # one flag, which changes the default
        if Mapping in self.kinds:
            return parse_overrides(text) if self.about.argument else parse_options(text)
        if self.several and self.commas:
            return self._parse_list(text)
        return int(text) if int in self.kinds and isinstance(text, str) and text.isdigit() else text

    def _parse_list(self, text: str) -> list[str] | list[int]:
        words, allowed = [word.strip() for word in text.split(",") if word.strip()], self.about.range
        if allowed is None:
            if not words:
                raise ValueError(f"{self.flag} takes names separated by commas, not {text!r}.")
            return words
        if not words or not all(word.isdecimal() and allowed.holds(int(word)) for word in words):
            raise ValueError(
                f"{self.flag} takes whole numbers of at least {allowed.least}, as in 512,1024, not {text!r}."
            )
        return [int(word) for word in words]

    def _completion(self) -> Callable[[str], list[str]] | None:
        if self.field.name == "what":
            return complete_encoding_or_folder
        if self.about.complete is None and not self.about.choices:
            return None

        def complete(incomplete: str) -> list[str]:
            before, comma, last = incomplete.rpartition(",") if self.commas else ("", "", incomplete)
            words = self.about.choices if self.about.complete is None else self.about.complete()
            return [f"{before}{comma}{word}" for word in beginning(words, last)]

        return complete


def _parameters(cls: Any) -> list[_Parameter]:
    """The options of a dataclass that the command line has."""
    return [_Parameter(field, about) for field, about in options_of(cls) if about.command]


def parse_options(pairs: Sequence[str]) -> dict[str, object]:
    """Options of an encoding, written as key=value."""
    options: dict[str, object] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--option takes key=value, not {pair!r}.")
        check_not_empty(f"--option {key}", text)
        try:
            options[key] = json.loads(text)  # numbers, true and false, lists, dictionaries
        except json.JSONDecodeError:
            options[key] = text
    return options


def complete_encoding_or_folder(incomplete: str) -> list[str]:
    """Encodings by name, and folders."""
    parent, slash, last = incomplete.rpartition("/")
    folders = sorted(folder.name for folder in Path(f"{parent}{slash}" or ".").glob("[!.]*/") if folder.is_dir())
    return [*beginning(names(), incomplete), *(f"{parent}{slash}{name}/" for name in beginning(folders, last))]


def beginning(words: Iterable[str], incomplete: str) -> list[str]:
    """The words that begin with what is typed."""
    return [word for word in words if word.startswith(incomplete)]
