"""The parameters of an encoding that a person can move: derived from its options and from its learned values.

An encoding says nothing about sliders. Options come from its signature, their meaning from its docstring, and their
range from trying values: what the encoding refuses is outside. Learned values are those of its parameters, and lists of
one number per head.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from torch import nn

from relpos.encodings.registry import encoding, encoding_class
from relpos.forms.cards import meanings_of, options_of
from relpos.forms.encoding import Encoding
from relpos.forms.parameters import BoundedParameter, PositiveParameter
from relpos.system.errors import unknown

MOST_VALUES = 64  # of a learned value that becomes a slider
FACTORS = (1024.0, 128.0, 16.0, 4.0, 2.0, 1.0)  # of an option's default, until the encoding takes the value
STEPS = (1, 2, 4, 8)
SIZES = ("width",)  # options that change what the encoding reads, not what it does


@dataclass(frozen=True)
class Slider:
    """One parameter, with its range."""

    name: str
    label: str
    help: str
    kind: Literal["float", "int", "choice", "per_head"]
    low: float | None
    high: float | None
    step: float | None
    scale: Literal["linear", "log"]
    value: Any
    choices: list[Any] | None

    def as_json(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        return asdict(self)


def sliders(name: str, heads: int, head_dim: int, seed: int = 0) -> list[Slider]:
    """The sliders of an encoding by name, at its start values.

    Args:
        name: The encoding's name.
        heads: Number of heads.
        head_dim: Size of a head.
        seed: Of its start values.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        position = encoding(name, heads, head_dim)
    learned = [slider for slider, _ in _learned(position, set(options_of(type(position))))]
    starts = {slider.label for slider in learned if slider.kind == "float"}  # whose options are but their start values
    return [
        slider for option, slider in _option_sliders(name, heads, head_dim).items() if option not in starts
    ] + learned


@cache
def _option_sliders(name: str, heads: int, head_dim: int) -> dict[str, Slider]:
    """The sliders of all options by name; an encoding is made several times to find their ranges."""
    cls = encoding_class(name)
    meanings = meanings_of(cls)
    return {
        option: slider
        for option, parameter in options_of(cls).items()
        if option not in SIZES
        for slider in _of_option(name, heads, head_dim, option, parameter.annotation, parameter.default, meanings)
    }


def make_encoding(name: str, heads: int, head_dim: int, values: Mapping[str, Any], seed: int = 0) -> Encoding:
    """Make an encoding with given options and learned values.

    Args:
        name: The encoding's name.
        heads: Number of heads.
        head_dim: Size of a head.
        values: By the names of `sliders`.
        seed: Of its start values.

    Raises:
        ValueError: A name is unknown, or a value is not a finite number or out of range.
    """
    known = options_of(encoding_class(name))
    ranges = _option_sliders(name, heads, head_dim) if any(key in known for key in values) else {}
    options = {}
    for key in values.keys() & known.keys():
        if key not in ranges:
            raise ValueError(f"the option {key} of {name} is neither a number nor a choice, and cannot be set here.")
        options[key] = _option(ranges[key], values[key])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        position = encoding(name, heads, head_dim, **options)
    assign = {slider.name: (slider, setter) for slider, setter in _learned(position, set(known))}
    for key, value in values.items():
        if key in known:
            continue
        if key not in assign:
            raise ValueError(f"{name} has no parameter {key!r}: it has {', '.join([*known, *assign]) or 'none'}.")
        slider, setter = assign[key]
        setter(_numbers(slider, value, heads))
    return position


def _option(slider: Slider, value: Any) -> Any:
    if slider.kind == "choice":
        if value not in (slider.choices or []):
            raise unknown(slider.name, value, map(str, slider.choices or []))
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{slider.name} must be a finite number, not {value!r}."[:300])
    if slider.kind == "int" and not float(value).is_integer():
        raise ValueError(f"{slider.name} must be an integer, not {value!r}.")
    assert slider.low is not None
    assert slider.high is not None
    if not slider.low <= value <= slider.high:
        raise ValueError(f"{slider.name} must lie between {slider.low:g} and {slider.high:g}, not {value!r}.")
    return int(value) if slider.kind == "int" else float(value)


def _numbers(slider: Slider, value: Any, heads: int) -> list[float]:
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in numbers):
        raise ValueError(f"{slider.name} must hold finite numbers, not {value!r}."[:300])
    count = len(slider.value) if isinstance(slider.value, list) else 1
    if len(numbers) not in (1, count):
        raise ValueError(f"{slider.name} has {count} values, one per head: give {count} or one, not {len(numbers)}.")
    assert slider.low is not None
    assert slider.high is not None
    limit = 1e6 * max(1.0, abs(slider.low), abs(slider.high))
    if any(abs(x) > limit for x in numbers):
        raise ValueError(f"{slider.name} must lie between {-limit:g} and {limit:g}.")
    return [float(x) for x in (numbers if len(numbers) == count else numbers * count)]


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _of_option(
    encoding_name: str,
    heads: int,
    head_dim: int,
    name: str,
    annotation: Any,
    default: Any,
    meanings: Mapping[str, str],
) -> Iterator[Slider]:
    """The slider of an option; none for one that is neither a number nor a choice."""
    label, meaning, kinds = name.replace("_", " "), meanings.get(name, ""), _kinds(annotation)
    if get_origin(annotation) is Literal or annotation is bool:
        choices = [False, True] if annotation is bool else list(get_args(annotation))
        works = [choice for choice in choices if _accepts(encoding_name, heads, head_dim, {name: choice})]
        yield Slider(name, label, meaning, "choice", None, None, None, "linear", default, works)
        return
    if not {int, float} & set(kinds):
        return
    kind: Literal["int", "float"] = "float" if float in kinds else "int"
    start = default if default is not None else _attribute(encoding_name, heads, head_dim, name)
    if isinstance(start, bool) or not isinstance(start, int | float):
        return

    def accepts(value: float) -> bool:
        return _accepts(encoding_name, heads, head_dim, {name: int(value) if kind == "int" else float(value)})

    size = abs(start) or 1.0
    if kind == "int":
        high = next((int(start * f) for f in FACTORS if start * f <= 2**16 and accepts(int(start * f))), int(start))
        step = next((step for step in STEPS if accepts(start + step)), 1)
        low = next((value for value in (1, step, 2 * step, 4 * step, int(start)) if accepts(value)), int(start))
        yield Slider(name, label, meaning, "int", low, high, step, "log" if high > 64 * low else "linear", start, None)
        return
    high_f = next((start * f for f in FACTORS if start > 0 and accepts(start * f)), start + size)
    low_f = next((value for value in (start / 1024, start / 16, start / 2) if value and accepts(value)), start)
    if start == 0:
        high_f, low_f = next((x for x in (10.0, 1.0) if accepts(x)), 1.0), 0.0
    log = low_f > 0 and high_f > 16 * low_f
    yield Slider(
        name, label, meaning, "float", low_f, high_f, _step(low_f, high_f), "log" if log else "linear", start, None
    )


def _attribute(name: str, heads: int, head_dim: int, option: str) -> Any:
    """What an encoding puts in the place of an option that is None by default, as far as it can be seen."""
    with torch.random.fork_rng(devices=[]):
        position = encoding(name, heads, head_dim)
    holders = [position, *(value for value in vars(position).values() if hasattr(value, option))]
    return next((getattr(holder, option) for holder in holders if getattr(holder, option, None) is not None), None)


def _accepts(name: str, heads: int, head_dim: int, options: Mapping[str, Any]) -> bool:
    try:
        with torch.random.fork_rng(devices=[]):
            encoding(name, heads, head_dim, **options)
    except (ValueError, TypeError, OverflowError, RuntimeError):
        return False
    return True


def _learned(position: Encoding, taken: set[str]) -> Iterator[tuple[Slider, Any]]:
    """The learned values that are few enough, and lists of one number per head; each with a function that sets it."""
    inside: set[int] = set()
    for path, module in position.named_modules():
        if isinstance(module, PositiveParameter | BoundedParameter) and module.raw.numel() <= MOST_VALUES:
            inside.add(id(module.raw))
            values = [float(x) for x in module(torch.float32).detach().flatten()]
            low, high = (
                (module.low, module.high) if isinstance(module, BoundedParameter) else (module.floor, _above(values))
            )
            yield _slider(_free(path, taken), values, low, high, position.heads), _assign(module)
    for path, parameter in position.named_parameters():
        if id(parameter) in inside or parameter.dim() > 1 or parameter.numel() not in (1, position.heads):
            continue
        values = [float(x) for x in parameter.detach().flatten()]
        yield _slider(_free(path, taken), values, -_above(values), _above(values), position.heads), _copy(parameter)
    for name, value in vars(position).items():
        if isinstance(value, list) and len(value) == position.heads and all(isinstance(x, float) for x in value):
            low = 0.0 if min(value) >= 0 else -_above(value)
            yield _slider(_free(name, taken), value, low, _above(value), position.heads), _replace(position, name)


def _slider(name: str, values: list[float], low: float, high: float, heads: int) -> Slider:
    kind: Literal["per_head", "float"] = "per_head" if len(values) == heads and heads > 1 else "float"
    label = name.removesuffix("_values").rpartition(".")[2].replace("_", " ")
    meaning = f"{label}, one value per head" if kind == "per_head" else f"{label}, a learned value"
    value = values if kind == "per_head" else values[0]
    return Slider(name, label, meaning, kind, low, high, _step(low, high), "linear", value, None)


def _free(name: str, taken: set[str]) -> str:
    return f"{name}_values" if name in taken else name


def _above(values: list[float]) -> float:
    """The end of a range around some values: the next power of two from four times the largest on."""
    return 2.0 ** math.ceil(math.log2(max(4 * max(map(abs, values)), 1.0)))


def _step(low: float, high: float) -> float:
    return 10.0 ** math.floor(math.log10(max(high - low, 1e-9) / 500))


def _assign(module: PositiveParameter | BoundedParameter) -> Any:
    def assign(numbers: list[float]) -> None:
        module.assign(torch.tensor(numbers).view_as(module.raw))

    return assign


def _copy(parameter: nn.Parameter) -> Any:
    def assign(numbers: list[float]) -> None:
        with torch.no_grad():
            parameter.copy_(torch.tensor(numbers).view_as(parameter))

    return assign


def _replace(position: Encoding, name: str) -> Any:
    return lambda numbers: setattr(position, name, numbers)
