"""Options, written once: a dataclass per operation, whose fields know their meaning, default and allowed values.

From it come the arguments of the Python function (`takes`), the command line (relpos/cli/from_options.py), the settings
file (relpos/runs/settings.py) and the reference pages. Imports nothing heavy. The dataclasses are made at every
`relpos --help`, so they have no `==` and no repr.
"""

import dataclasses
import functools
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from relpos.system.errors import check_not_empty, unknown

Arguments = ParamSpec("Arguments")
Options = TypeVar("Options")
Result = TypeVar("Result")


@dataclass
class Range:
    """Allowed numbers."""

    least: float = 0
    most: float = math.inf
    above: bool = False  # whether `least` itself is excluded
    below: float = math.inf  # an upper bound that is itself excluded

    def holds(self, value: float) -> bool:
        low_enough = math.isfinite(value) and value <= self.most and value < self.below
        return low_enough and (value > self.least if self.above else value >= self.least)

    def __str__(self) -> str:
        words = [f"above {self.least:,}" if self.above else f"at least {self.least:,}"]
        words += [f"at most {self.most:,}"] if self.most < math.inf else []
        words += [f"below {self.below:,}"] if self.below < math.inf else []
        return " and ".join(words if len(words) > 1 else [*words, "finite"])


NOT_NEGATIVE = Range()
POSITIVE = Range(above=True)
COUNT = Range(1)
TOKENS = Range(2)  # of a window: one token predicts the next
SEED = Range(below=2**32)  # as numpy takes it
# Ends of sentences of several operations.
EXECUTOR = "instead of `workers` processes of this machine: a `RayExecutor` or a `SlurmExecutor` (docs/scale.md)."


@dataclass
class Option:
    """What is known of an option beside its name, type and default."""

    meaning: str  # a sentence or two
    shown: str = ""  # the default in words, if it is not a constant
    range: Range | None = None  # allowed numbers
    choices: tuple[str, ...] = ()  # allowed words
    complete: Callable[[], Iterable[str]] | None = None  # the words that the shell completes, if there are no choices
    metavar: str = ""  # the value in the help; with a comma in it, several values are separated by commas
    panel: str = ""  # group in the help
    flag: str = ""  # name on the command line, if it is not the field's own
    argument: bool = False  # whether the command line takes it without a flag
    command: bool = True  # whether the command line has it
    key: str = ""  # the setting behind it, by dotted key


def option(default: Any, meaning: str, **more: Any) -> Any:
    """A field of an options dataclass; `more` are fields of `Option`."""
    metadata = {"option": Option(meaning, **more)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def required(meaning: str, **more: Any) -> Mapping[str, Option]:
    """The metadata of a field without a default: `field(metadata=required(...))`."""
    return {"option": Option(meaning, **more)}


def options_of(cls: Any) -> Iterator[tuple["dataclasses.Field[Any]", Option]]:
    """The fields of an options dataclass, each with what is known of it."""
    return ((field_, field_.metadata["option"]) for field_ in dataclasses.fields(cls))


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The types that a hint allows, without their parameters: (Sequence, NoneType) for Sequence[int] | None."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)  # int | Literal[…] is the second
    allowed = typing.get_args(hint) if union else (hint,)
    return tuple(typing.get_origin(kind) or kind for kind in allowed)


def default_words(field_: "dataclasses.Field[Any]") -> str:
    """The default of an option as help and docstrings print it; empty if there is nothing to say."""
    about, default = field_.metadata["option"], field_.default
    if about.shown or default is None or isinstance(default, bool) or default in ((), "", dataclasses.MISSING):
        return str(about.shown)
    return "" if callable(default) else str(default)


def check_options(options: Any) -> None:
    """Check every option of an instance: empty strings, types of numbers and switches, ranges and choices."""
    for field_, about in options_of(options):
        name, value = field_.name, getattr(options, field_.name)
        if field_.default != "" and (about.command or isinstance(value, str)):  # a token's name may be a space
            check_not_empty(name, value)
        if value is None or (callable(value) and value is field_.default):
            continue
        kinds = kinds_of(field_.type)
        if kinds == (bool,) and not isinstance(value, bool):  # a text such as "no" would count as True
            raise TypeError(f"{name} must be True or False, not {value!r}.")
        if about.choices and isinstance(value, str) and value not in about.choices:
            raise unknown(name, value, about.choices)
        if about.range is not None:
            several = isinstance(value, Sequence) and not isinstance(value, str)
            kind, words = (int | float, "a number") if float in kinds else (int, "an integer")
            for number in value if several else [value]:
                if isinstance(number, str) and number in about.choices:  # a word instead of a number
                    continue
                if not isinstance(number, kind) or isinstance(number, bool):
                    raise ValueError(f"{name} must be {words} of {about.range}, not {number!r}.")
                if not about.range.holds(number):
                    raise ValueError(f"{name} must be {about.range}, not {number!r}.")


def takes(
    options: Callable[Arguments, Options],
) -> Callable[[Callable[[Options], Result]], Callable[Arguments, Result]]:
    """Give a function of an options object the fields of that object as arguments, checked.

    Its signature and the section Args of its docstring are made from the fields.

    Example:
        >>> @takes(TrainOptions)
        ... def train(options: TrainOptions) -> Run: ...
        >>> train("alibi", steps=100)
    """

    def decorate(function: Callable[[Options], Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def with_arguments(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            checked = options(*args, **kwargs)
            check_options(checked)
            return function(checked)

        result = function.__annotations__.get("return", inspect.Signature.empty)
        signature = inspect.signature(options).replace(return_annotation=result)
        with_arguments.__signature__ = signature  # type: ignore[attr-defined]
        with_arguments.__annotations__ = {"return": result}
        del with_arguments.__wrapped__  # whose signature tools would show instead
        text = inspect.cleandoc(function.__doc__ or "")
        with_arguments.__doc__ = text.replace("Returns:\n", f"{_arguments_section(options)}\n\nReturns:\n", 1)
        return with_arguments

    return decorate


def _arguments_section(options: Any) -> str:
    """The section Args of a docstring."""
    lines = ["Args:"]
    for field_, about in options_of(options):
        default = default_words(field_) or ("True" if field_.default is True else "")
        words = f"{field_.name}: {about.meaning}" + (f" Default: {default}." if default else "")
        lines += textwrap.wrap(words, 110, initial_indent="    ", subsequent_indent=" " * 8)
    return "\n".join(lines)
