"""The parameters of an encoding that a person can move: derived from its options and from its learned values.

An encoding says nothing about sliders. Options come from its signature, their meaning from its docstring, and their
range from trying values: what the encoding refuses is outside. Learned values are those of its parameters, and lists of
one number per head.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from torch import nn

from relpos.encodings.registry import encoding, encoding_class
from relpos.explorer.replies import Parameter, Preset, Slider
from relpos.forms.cards import meanings_of, options_of
from relpos.forms.encoding import Encoding
from relpos.forms.parameters import RangeParameter
from relpos.system.errors import unknown

MOST_VALUES = 64  # of a learned value that becomes a slider
FACTORS = (1024.0, 128.0, 16.0, 4.0, 2.0, 1.0)  # of an option's default, until the encoding takes the value
STEPS = (1, 2, 4, 8)
SIZES = ("width",)  # options that change what the encoding reads, not what it does
PRESETS = Path(__file__).with_name("presets.json")
Setter = Callable[[list[float]], object]


def sliders(name: str, heads: int, head_dim: int, seed: int = 0) -> list[Slider]:
    """The sliders of an encoding by name, at its start values."""
    position = _make(name, heads, head_dim, seed)
    learned = [slider for slider, _ in _learned(position, set(options_of(type(position))))]
    starts = {slider["label"] for slider in learned if slider["kind"] == "float"}  # of options that are start values
    options = _option_sliders(name, heads, head_dim).items()
    return [slider for option, slider in options if option not in starts] + learned


@cache
def presets() -> dict[str, list[Preset]]:
    """Parameters worth a look, by encoding."""
    content: dict[str, list[Preset]] = json.loads(PRESETS.read_text(encoding="utf-8"))
    return content


def make_encoding(name: str, heads: int, head_dim: int, values: Mapping[str, Any], seed: int = 0) -> Encoding:
    """Make an encoding with given options and learned values, by the names of `sliders`."""
    known = options_of(encoding_class(name))
    ranges = _option_sliders(name, heads, head_dim) if any(key in known for key in values) else {}
    options = {}
    for key in values.keys() & known.keys():
        if key not in ranges:
            raise ValueError(f"the option {key} of {name} is neither a number nor a choice, and cannot be set here.")
        options[key] = _option(ranges[key], values[key])
    position = _make(name, heads, head_dim, seed, **options)
    assign = {slider["name"]: (slider, setter) for slider, setter in _learned(position, set(known))}
    for key in values.keys() - known.keys():
        if key not in assign:
            raise ValueError(f"{name} has no parameter {key!r}: it has {', '.join([*known, *assign]) or 'none'}.")
        slider, setter = assign[key]
        setter(_numbers(slider, values[key]))
    return position


def _make(name: str, heads: int, head_dim: int, seed: int = 0, **options: Any) -> Encoding:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return encoding(name, heads, head_dim, **options)


def _option(slider: Slider, value: Any) -> Any:
    name, low, high = slider["name"], slider["low"], slider["high"]
    if slider["kind"] == "choice":
        if value not in (slider["choices"] or []):
            raise unknown(name, value, map(str, slider["choices"] or []))
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value!r}."[:300])
    if slider["kind"] == "int" and not float(value).is_integer():
        raise ValueError(f"{name} must be an integer, not {value!r}.")
    assert low is not None
    assert high is not None
    if not low <= value <= high:
        raise ValueError(f"{name} must lie between {low:g} and {high:g}, not {value!r}.")
    return int(value) if slider["kind"] == "int" else float(value)


def _numbers(slider: Slider, value: Any) -> list[float]:
    name, numbers = slider["name"], value if isinstance(value, list) else [value]
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in numbers):
        raise ValueError(f"{name} must hold finite numbers, not {value!r}."[:300])
    count = len(slider["value"]) if isinstance(slider["value"], list) else 1
    if len(numbers) not in (1, count):
        raise ValueError(f"{name} has {count} values, one per head: give {count} or one, not {len(numbers)}.")
    limit = 1e6 * max(1.0, abs(slider["low"] or 0.0), abs(slider["high"] or 0.0))
    if any(abs(x) > limit for x in numbers):
        raise ValueError(f"{name} must lie between {-limit:g} and {limit:g}.")
    return [float(x) for x in (numbers if len(numbers) == count else numbers * count)]


@cache
def _option_sliders(name: str, heads: int, head_dim: int) -> dict[str, Slider]:
    """The sliders of all options by name, but of those that are neither numbers nor choices."""
    cls = encoding_class(name)
    meanings, result = meanings_of(cls), dict[str, Slider]()

    def accepts(option: str, value: Any) -> bool:
        try:
            _make(name, heads, head_dim, **{option: value})
        except (ValueError, TypeError, OverflowError, RuntimeError):
            return False
        return True

    for option, parameter in options_of(cls).items():
        annotation, start = parameter.annotation, parameter.default
        words = (option, option.replace("_", " "), meanings.get(option, ""))
        kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        if option in SIZES:
            continue
        if get_origin(annotation) is Literal or annotation is bool:
            choices = [False, True] if annotation is bool else list(get_args(annotation))
            works = [choice for choice in choices if accepts(option, choice)]
            result[option] = _slider(*words, "choice", start, choices=works)
            continue
        numeric = bool({int, float} & set(kinds))
        if start is None and numeric:
            start = _attribute(_make(name, heads, head_dim), option)
        if not numeric or isinstance(start, bool) or not isinstance(start, int | float):
            continue
        if float in kinds:
            ends = _float_range(start, partial(accepts, option))
            log = ends[0] > 0 and ends[1] > 16 * ends[0]
        else:
            ends = _int_range(int(start), partial(accepts, option))
            log = ends[1] > 64 * ends[0]
        result[option] = _slider(*words, "float" if float in kinds else "int", start, ends, log)
    return result


def _int_range(start: int, accepts: Callable[[int], bool]) -> tuple[float, float, float]:
    high = next((int(start * f) for f in FACTORS if start * f <= 2**16 and accepts(int(start * f))), int(start))
    step = next((step for step in STEPS if accepts(start + step)), 1)
    return next((x for x in (1, step, 2 * step, 4 * step, int(start)) if accepts(x)), int(start)), high, step


def _float_range(start: float, accepts: Callable[[float], bool]) -> tuple[float, float, float]:
    high = next((start * f for f in FACTORS if start > 0 and accepts(start * f)), start + (abs(start) or 1.0))
    low = next((x for x in (start / 1024, start / 16, start / 2) if x and accepts(x)), start)
    if start == 0:
        low, high = 0.0, next((x for x in (10.0, 1.0) if accepts(x)), 1.0)
    return low, high, _step(low, high)


def _attribute(position: Encoding, option: str) -> Any:
    """What an encoding puts in the place of an option that is None by default, as far as it can be seen."""
    holders = [position, *(value for value in vars(position).values() if hasattr(value, option))]
    return next((getattr(holder, option) for holder in holders if getattr(holder, option, None) is not None), None)


def _learned(position: Encoding, taken: set[str]) -> Iterator[tuple[Slider, Setter]]:
    """The learned values that are few enough, and lists of one number per head; each with a function that sets it."""

    def slider(path: str, values: list[float], low: float, high: float) -> Slider:
        name = f"{path}_values" if path in taken else path
        label = path.replace(".", ": ").replace("_", " ")
        ends = (low, high, _step(low, high))
        if len(values) == position.heads > 1:
            label += ": value" if path in taken else ""  # beside the option of the same name
            return _slider(name, label, "One value per head.", "per_head", values, ends)
        return _slider(name, label, "A learned value.", "float", values[0], ends)

    inside: set[int] = set()
    for path, module in position.named_modules():
        if isinstance(module, RangeParameter) and module.raw.numel() <= MOST_VALUES:
            inside.add(id(module.raw))
            values = [float(x) for x in module(torch.float32).detach().flatten()]
            high = module.high if math.isfinite(module.high) else _above(values)
            yield slider(path, values, module.low, high), partial(_assign, module)
    for path, parameter in position.named_parameters():
        if id(parameter) in inside or parameter.dim() > 1 or parameter.numel() not in (1, position.heads):
            continue
        values = [float(x) for x in parameter.detach().flatten()]
        yield slider(path, values, -_above(values), _above(values)), partial(_assign, parameter)
    for name, value in vars(position).items():
        if isinstance(value, list) and len(value) == position.heads and all(isinstance(x, float) for x in value):
            low = 0.0 if min(value) >= 0 else -_above(value)
            yield slider(name, value, low, _above(value)), partial(setattr, position, name)


@torch.no_grad()
def _assign(target: RangeParameter | nn.Parameter, numbers: list[float]) -> None:
    if isinstance(target, nn.Parameter):
        target.copy_(torch.tensor(numbers).view_as(target))
    else:
        target.assign(torch.tensor(numbers).view_as(target.raw))


def _slider(
    name: str,
    label: str,
    meaning: str,
    kind: Literal["float", "int", "choice", "per_head"],
    value: Parameter,
    ends: tuple[float | None, float | None, float | None] = (None, None, None),
    log: bool = False,
    choices: list[str | float | bool] | None = None,
) -> Slider:
    low, high, step = ends
    words = {"name": name, "label": label, "help": meaning}
    numbers = {"low": low, "high": high, "step": step, "scale": "log" if log else "linear"}
    return {**words, "kind": kind, **numbers, "value": value, "choices": choices}  # type: ignore[typeddict-item]


def _above(values: list[float]) -> float:
    """The end of a range around some values: the next power of two from four times the largest on."""
    return 2.0 ** math.ceil(math.log2(max(4 * max(map(abs, values)), 1.0)))


def _step(low: float, high: float) -> float:
    return 10.0 ** math.floor(math.log10(max(high - low, 1e-9) / 500))
