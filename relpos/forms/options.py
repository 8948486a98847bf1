"""The options of an encoding class: names, types and defaults from its `__init__`, meanings from its docstring."""

import inspect
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from relpos.system.errors import unknown

SIZES = ("heads", "head_dim")  # what every encoding takes before its options
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def signature(cls: type) -> inspect.Signature:
    """The signature of a class's `__init__` without `self`."""
    try:
        of_init = inspect.signature(cls.__init__, eval_str=True)  # type: ignore[misc]
    except NameError:  # an annotation in quotes names something that was imported for type checkers only
        of_init = inspect.signature(cls.__init__)  # type: ignore[misc]
    return of_init.replace(parameters=list(of_init.parameters.values())[1:])


def options_of(cls: type) -> Mapping[str, inspect.Parameter]:
    """The options of an encoding class by name, in the order of its signature."""
    parameters = signature(cls).parameters.values()
    return {each.name: each for each in parameters if each.kind in NAMED and each.name not in SIZES}


def check_names(encoding: str, cls: type, options: Mapping[str, object]) -> None:
    """Refuse options that a class does not have."""
    allowed = options_of(cls)
    for option in options:
        if option not in allowed:
            raise unknown(f"option of {encoding}", option, allowed)


def check_choices(cls: type, options: Mapping[str, object]) -> None:
    """Refuse a value that is not among the choices of an option annotated with `Literal`."""
    for name, parameter in options_of(cls).items():
        choices = get_args(parameter.annotation) if get_origin(parameter.annotation) is Literal else None
        if choices is not None and options[name] not in choices:
            raise unknown(name, options[name], choices)


def type_text(annotation: Any) -> str:
    """An annotation as people write it: `int | None`, `"half" | "interleaved"`, `Sequence[str]`."""
    if annotation is inspect.Parameter.empty:
        return ""
    if get_origin(annotation) is Literal:
        return " | ".join(f'"{choice}"' for choice in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(type_text(choice) for choice in get_args(annotation))
    if annotation is types.NoneType:
        return "None"
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    return re.sub(r"\b(?:\w+\.)+", "", str(annotation))  # without the modules: Mapping[str, object]


def summary_of(cls: type) -> str:
    """The first line of a class's docstring."""
    return (cls.__doc__ or "").strip().split("\n", 1)[0]


def meanings_of(cls: type) -> dict[str, str]:
    """What the section Args of a class's docstring (Google style) says about each argument."""
    meanings: dict[str, str] = {}
    inside, name = False, ""
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        if line and not line.startswith(" "):
            inside = line == "Args:"
        elif inside and (entry := re.match(r" {4}(\w+): (.*)", line)):
            name = entry[1]
            meanings[name] = entry[2].strip()
        elif inside and name and line.strip():
            meanings[name] += f" {line.strip()}"
    return meanings
