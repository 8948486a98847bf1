"""Settings from defaults, a YAML file or recipe, and overrides by dotted key."""

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from relpos.runs import defaults
from relpos.runs.resolve import flatten, resolve
from relpos.runs.settings import TABLES, Settings
from relpos.system.errors import check_not_empty, unknown
from relpos.system.mappings import read_yaml

RECIPES = Path(__file__).with_name("recipes")
START = {"optimizer.position_lr": defaults.START_POSITION_LR, **TABLES}  # defaults of a run that starts from a model
TASK = {"data.length": defaults.TASK_LENGTH, "run.batch_size": defaults.TASK_BATCH}  # defaults of a run on a task
EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")  # 1e-3, which YAML reads as text


def load_settings(file: str | None, overrides: Mapping[str, Any]) -> Settings:
    """Settings from their defaults, then a file, then overrides.

    Args:
        file: A YAML file, or the name of a recipe; None for neither.
        overrides: Values by dotted key, as in {"data.length": 1024}.

    Returns:
        The settings, checked, with every default filled in.

    Raises:
        ValueError: A key is unknown, or a value is of another type or out of range.
        FileNotFoundError: There is no such file.
    """
    values = {**(flatten(_read(file)) if file else {}), **overrides}
    if values.get("data.task") is not None:
        values = {**TASK, **values}
    if values.get("model.start") is not None:
        values = {**START, **values}
    settings = Settings()
    for key, value in values.items():
        _set(settings, key, value)
    return resolve(settings)


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """Read overrides as they are written on the command line.

    Args:
        pairs: Each is key=value, as in data.length=1024; the value is YAML.

    Raises:
        ValueError: A pair has no equals sign, or its value is not YAML.
    """
    overrides = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"an override is key=value, as in data.length=1024, not {pair!r}.")
        check_not_empty(key, text)  # nothing is written as null
        try:
            overrides[key] = float(text) if EXPONENT.fullmatch(text) else yaml.safe_load(text)
        except yaml.YAMLError:
            raise ValueError(
                f"{pair!r} is not a setting: {text!r} is not a YAML value. Give a number, true or false, a word, or a "
                "list as in [a, b]; put quotation marks around a text with special characters."
            ) from None
    return overrides


def recipes() -> list[str]:
    """The names of the recipes."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def _read(name: str) -> dict[str, Any]:
    path = Path(name)
    if not path.suffix and not path.exists():
        path = RECIPES / f"{name}.yaml"
        if not path.exists():
            raise unknown("recipe", name, recipes())
    if not path.exists():
        raise FileNotFoundError(
            f"there is no file {path}: --config takes a YAML file with settings, or a recipe: {', '.join(recipes())}."
        )
    tree = read_yaml(path)
    tree.pop("about", None)  # what a finished run's file says beside its settings
    return tree


def _set(settings: Settings, key: str, value: Any) -> None:
    known = flatten(dataclasses.asdict(Settings()))
    if key.startswith("model.options.") and key.count(".") == 2:
        settings.model.options[key.rsplit(".", 1)[1]] = value
        return
    if key not in known:
        raise unknown("setting", key, known)
    section, name = key.split(".")
    target = getattr(settings, section)
    setattr(target, name, _typed(key, value, typing.get_type_hints(type(target))[name]))


def _typed(key: str, value: Any, hint: Any) -> Any:
    """The value, if it is of the setting's type; YAML reads 1e-3 as text, and 3 is a fine float."""
    check_not_empty(key, value)
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = [typing.get_origin(kind) or kind for kind in allowed]
    if isinstance(value, str) and str not in kinds and (float in kinds or int in kinds):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{key} must be a number, not {value!r}.") from None
    if int in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, tuple(kinds)) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("nothing" if kind is types.NoneType else kind.__name__ for kind in kinds)
        raise ValueError(f"{key} must be {wanted}, not {value!r}.")
    return value
