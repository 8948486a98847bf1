"""Every encoding by name. To add one: write its file, add its line to `FILES`.

Nothing here imports torch before an encoding is made.
"""

import dataclasses
import functools
import importlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from relpos.forms.cards import SIZES, Card, compute_card, options_of
from relpos.system.errors import unknown
from relpos.system.memory import check_memory

if TYPE_CHECKING:
    from relpos.forms.encoding import Encoding

FILES = {  # name: file and class
    "alibi": ("alibi", "Alibi"),
    "cable": ("cable", "Cable"),
    "cable_nw": ("cable", "CableNoWeight"),
    "clipped": ("clipped", "Clipped"),
    "cope": ("cope", "Cope"),
    "dape": ("dape", "Dape"),
    "dapev2": ("dapev2", "DapeV2"),
    "fire": ("fire", "Fire"),
    "forgetting": ("forgetting", "Forgetting"),
    "kcable": ("cable", "KernelCable"),
    "kerple_log": ("kerple", "KerpleLog"),
    "kerple_power": ("kerple", "KerplePower"),
    "learned": ("learned", "Learned"),
    "nope": ("nope", "Nope"),
    "rope": ("rope", "Rope"),
    "sandwich": ("sandwich", "Sandwich"),
    "sinusoidal": ("sinusoidal", "Sinusoidal"),
    "ssmax": ("ssmax", "Ssmax"),
    "sum": ("sum", "SumEncoding"),
    "t5": ("t5", "T5"),
    "temperature": ("temperature", "Temperature"),
    "window": ("window", "Window"),
    "xpos": ("xpos", "Xpos"),
}
ALIASES = {"fox": "forgetting", "kerple": "kerple_log", "t5_bias": "t5"}  # other names that people use: ours
OTHER_WORDS = {  # sizes and options as other libraries call them: our word
    **dict.fromkeys(("num_heads", "n_heads", "n_head", "nhead", "num_attention_heads"), "heads"),
    **dict.fromkeys(("dim_head", "head_size", "d_head"), "head_dim"),
    **dict.fromkeys(("theta", "rope_theta", "rotary_base"), "base"),
}
LARGE = 2**27  # the product of an encoding's sizes from which its memory is checked
CARDS = Path(__file__).with_name("cards.json")  # so that `relpos ls` need not import torch; `make cards` writes it
Arguments = ParamSpec("Arguments")
_registered: dict[str, type["Encoding"]] = {}


def names() -> list[str]:
    """Return the names of all encodings, sorted.

    Returns:
        The built-in names and those that were registered.

    Example:
        >>> relpos.names()[:3]
        ['alibi', 'cable', 'cable_nw']
    """
    return sorted({*FILES, *_registered})


def register(name: object, cls: object) -> None:
    """Add an encoding: `relpos.register`, whose docstring says what is allowed."""
    from relpos.forms.encoding import Encoding

    if not (isinstance(cls, type) and issubclass(cls, Encoding)):
        raise TypeError(f"register needs a class derived from relpos.Encoding, not {cls!r}.")
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"an encoding's name must be a Python identifier, not {name!r}.")
    if name in FILES or _registered.get(name, cls) is not cls:
        raise ValueError(f"the name {name!r} is taken; choose another.")
    missing = [field for field in ("paper", "formula") if not isinstance(getattr(cls, field, None), str)]
    if missing:
        raise TypeError(f"{cls.__name__} must state its {' and '.join(missing)} as a string on the class.")
    required = [option for option, parameter in options_of(cls).items() if parameter.default is Parameter.empty]
    if required:
        raise TypeError(f"{cls.__name__} must have a default value for its option {', '.join(required)}.")
    _registered[name] = cls


def canonical(name: str) -> str:
    """The name in the registry that an alias stands for; any other name as it is.

    Example:
        >>> canonical("kerple"), canonical("alibi")
        ('kerple_log', 'alibi')
    """
    return ALIASES.get(name, name) if isinstance(name, str) and name not in _registered else name


def aliases_of(name: str) -> tuple[str, ...]:
    """The other names of an encoding."""
    return tuple(alias for alias, ours in ALIASES.items() if ours == name)


def unknown_option(name: str, option: str, allowed: Iterable[str]) -> ValueError:
    """The error about an option that an encoding does not have."""
    ours = OTHER_WORDS.get(option)
    if ours in (*SIZES, *allowed):
        return ValueError(f"{name} has no option {option!r}: it is called {ours!r} here.")
    return unknown(f"option of {name}", option, allowed)


def encoding_class(name: str) -> type["Encoding"]:
    """The class of an encoding."""
    name = canonical(name)
    if not isinstance(name, str) or name not in names():  # a list, from a settings file, could not be looked up
        raise unknown("encoding", name, names())
    if name in _registered:
        return _registered[name]
    file, class_name = FILES[name]
    cls: type[Encoding] = getattr(importlib.import_module(f"relpos.encodings.{file}"), class_name)
    return cls


def check_options_of(name: str, options: Iterable[str]) -> None:
    """Refuse an unknown encoding, and options that it does not have, by its card: without torch."""
    if canonical(name) not in names():
        raise unknown("encoding", name, names())
    allowed = card(name).options
    for option in options:
        if option not in allowed:
            raise unknown_option(name, option, allowed)


def check_encoding_or_folder(what: str | Path) -> None:
    """Refuse a name that is neither an encoding nor a file or folder; with a slash, it may be a model on the hub."""
    if canonical(str(what)) not in names() and len(Path(what).parts) == 1 and not Path(what).exists():
        raise unknown("encoding or folder", str(what), names())


def _in_our_words(function: Callable[Arguments, "Encoding"]) -> Callable[Arguments, "Encoding"]:
    """Refuse sizes under names of other libraries, where Python would say that ours are missing."""

    @functools.wraps(function)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> "Encoding":
        for word in kwargs:
            if OTHER_WORDS.get(word) in SIZES:
                raise TypeError(f"relpos.encoding has no argument {word!r}: it is called {OTHER_WORDS[word]!r} here.")
        return function(*args, **kwargs)

    return checked


@_in_our_words
def encoding(name: str, heads: int, head_dim: int, **options: Any) -> "Encoding":
    """Make an encoding by name.

    Args:
        name: One of `relpos.names()`.
        heads: Number of attention heads.
        head_dim: Size of a head.
        **options: Options of the encoding; `relpos ls NAME` and `relpos.card(name)` list them.

    Returns:
        A new encoding, an `nn.Module` with its own parameters at their start values.

    Raises:
        ValueError: The name or an option is unknown, or a value is not allowed.

    Example:
        >>> position = relpos.encoding("alibi", heads=12, head_dim=64, slopes="press")
        >>> out = relpos.attention(q, k, v, position)
    """
    cls = encoding_class(name)
    allowed = options_of(cls)
    for option in options:
        if option not in allowed:
            raise unknown_option(name, option, allowed)
    _check_memory(name, cls, {"heads": heads, "head_dim": head_dim, **options})
    return cls(heads, head_dim, **options)


def _check_memory(name: str, cls: type["Encoding"], sizes: Mapping[str, Any]) -> None:
    """Refuse sizes whose parameters do not fit into memory: they are counted without being allocated."""
    numbers = [size for size in sizes.values() if isinstance(size, int) and not isinstance(size, bool)]
    if math.prod(max(number, 1) for number in numbers) < LARGE:
        return
    import torch

    try:
        with torch.device("meta"):
            tensors = cls(**sizes).state_dict().values()
    except Exception:  # what is wrong with the sizes is said when the encoding is made
        return
    words = ", ".join(f"{key}={value:,}" for key, value in sizes.items() if value in numbers)
    bytes_needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    check_memory(f"{name} with {words}", bytes_needed, "give smaller sizes")


def card(name: str) -> Card:
    """Return what there is to know about an encoding: where it acts, its formula, its paper, its options.

    Args:
        name: One of `relpos.names()`.

    Returns:
        The card. Learned values and parameters are those of 12 heads, head_dim 64 and default options.

    Raises:
        ValueError: No encoding has this name.

    Example:
        >>> relpos.card("alibi").formula
        'B_ij = −m_h·|i − j|,  m_h = 2^(−8h/H)'
    """
    written, name = written_cards(), canonical(name)
    if name in written and name not in _registered:
        return written[name]
    return compute_card(name, encoding_class(name))


def builtin_card(name: str) -> Card:
    """The card of a built-in encoding, computed, with its other names."""
    return dataclasses.replace(compute_card(name, encoding_class(name)), aliases=aliases_of(name))


def write_cards() -> None:
    """Write the file of cards, for `make cards`."""
    cards = {name: dataclasses.asdict(builtin_card(name)) for name in FILES}
    CARDS.write_text(json.dumps(cards, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


@functools.cache
def written_cards() -> dict[str, Card]:
    """The cards in the file, by name. An encoding that is not in it yet has its card computed."""
    return {name: Card.from_json(entry) for name, entry in json.loads(CARDS.read_text(encoding="utf-8")).items()}
