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

LISTS = (Sequence, Iterable, list, tuple)


class Command(TyperCommand):
    """A command whose options and arguments refuse empty strings, and numbers that are not finite."""

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

        parameters = [_parameter(each, about) for cls in classes for each, about in options_of(cls) if about.command]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__doc__, run.__name__ = function.__doc__, function.__name__
        return run

    return decorate


def parsed_options(cls: Any, texts: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a dataclass that were given on the command line, parsed.

    Raises:
        ValueError: A text cannot be parsed.
    """
    values: dict[str, Any] = {}
    for each, about in options_of(cls):
        text = texts.get(each.name)
        if not about.command or text is None or text == []:
            continue
        if kinds_of(each.type) == (bool,):
            if about.flag or each.default is False:  # one flag, which changes the default
                values |= {each.name: not each.default} if text else {}
            else:
                values[each.name] = text
        else:
            values[each.name] = _parse(each, about, text)
    return values


def flag(each: "dataclasses.Field[Any]", about: Option) -> str:
    """The flag of an option; a switch that is on by default has two."""
    name = each.name.replace("_", "-")
    return about.flag or (f"--{name}/--no-{name}" if each.default is True else f"--{name}")


def _parameter(each: "dataclasses.Field[Any]", about: Option) -> inspect.Parameter:
    required = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
    words = default_words(each) or ("" if each.default is not True or about.flag else f"--{each.name}")
    help_text = about.meaning.replace("`", "")
    if _is_repeated(each, about) and not about.argument:
        help_text += " May be repeated."
    if words:
        help_text += f"  [default: {words}]"
    shared: dict[str, Any] = {
        "help": help_text,
        "metavar": about.metavar or "|".join(about.choices) or None,
        "rich_help_panel": about.panel or None,
        "autocompletion": _completion(each, about),
    }
    info: Any
    if about.argument:
        info = typer.Argument(**shared)
    else:
        info = typer.Option(flag(each, about), show_default=False, **shared, **_limits(about))
    kind = _kind(each, about)
    default = inspect.Parameter.empty if required else None
    hint: Any = Annotated[kind if required else kind | None, info]
    return inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _kind(each: "dataclasses.Field[Any]", about: Option) -> Any:
    """The type that typer converts to."""
    kinds = kinds_of(each.type)
    if _is_repeated(each, about):
        return list[int] if int in typing.get_args(each.type) else list[str]
    if bool in kinds:
        return bool
    if _is_list(each) or any(kind not in (int, float, type(None)) for kind in kinds):
        return str
    return float if float in kinds else int


def _is_list(each: "dataclasses.Field[Any]") -> bool:
    return any(kind in LISTS or kind is Mapping for kind in kinds_of(each.type))


def _is_repeated(each: "dataclasses.Field[Any]", about: Option) -> bool:
    """Whether the option may be given several times, or the argument has several words."""
    return about.argument or (_is_list(each) and "," not in about.metavar)


def _limits(about: Option) -> dict[str, Any]:
    """How typer checks a number. Ranges that typer does not have, or whose help would be too wide, are a callback."""
    allowed = about.range
    if allowed is None or "," in about.metavar:
        return {}

    def check(value: float | None) -> float | None:
        if value is not None and not allowed.holds(value):
            raise typer.BadParameter(f"{value} is not {allowed}.")  # typer adds the name of the option
        return value

    if allowed.above or allowed.below < math.inf:
        return {"callback": check}
    most = None if allowed.most in (math.inf, MOST_STEPS) else int(allowed.most)  # the settings refuse more steps
    return {"min": int(allowed.least), "max": most}


def _parse(each: "dataclasses.Field[Any]", about: Option, text: Any) -> Any:
    """The value of an option from its text, or from the texts of a repeated one."""
    kinds = kinds_of(each.type)
    if Mapping in kinds:
        return parse_overrides(text) if about.argument else parse_options(text)
    if _is_list(each) and "," in about.metavar:
        return parse_list(flag(each, about), text, about)
    if int in kinds and isinstance(text, str) and text.isdigit():
        return int(text)
    return text


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


def parse_list(option: str, text: str, about: Option) -> list[Any]:
    """Names or whole numbers separated by commas."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if about.range is None:
        if not words:
            raise ValueError(f"{option} takes names separated by commas, not {text!r}.")
        return words
    if not words or not all(word.isdecimal() and about.range.holds(int(word)) for word in words):
        raise ValueError(f"{option} takes whole numbers of at least {about.range.least}, as in 512,1024, not {text!r}.")
    return [int(word) for word in words]


# Completion by the shell


def _completion(each: "dataclasses.Field[Any]", about: Option) -> Callable[[str], list[str]] | None:
    if each.name == "what":
        return complete_encoding_or_folder
    words = about.complete or (lambda: about.choices)
    if about.complete is None and not about.choices:
        return None

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if "," in about.metavar else ("", "", incomplete)
        return [f"{before}{comma}{word}" for word in beginning(words(), last)]

    return complete


def complete_encoding_or_folder(incomplete: str) -> list[str]:
    """Encodings by name, and folders."""
    parent, slash, last = incomplete.rpartition("/")
    folders = sorted(folder.name for folder in Path(f"{parent}{slash}" or ".").glob("[!.]*/") if folder.is_dir())
    return [*beginning(names(), incomplete), *(f"{parent}{slash}{name}/" for name in beginning(folders, last))]


def beginning(words: Iterable[str], incomplete: str) -> list[str]:
    """The words that begin with what is typed."""
    return [word for word in words if word.startswith(incomplete)]
