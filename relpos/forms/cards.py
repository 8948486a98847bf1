"""What there is to know about an encoding class before making one: its options, and its card.

Options come from the signature of `__init__`, their meanings from the docstrings. Only computing a card needs torch.
"""

import inspect
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, Union, get_args, get_origin

from relpos.system.errors import unknown

if TYPE_CHECKING:
    from relpos.forms.encoding import Encoding

HEADS, HEAD_DIM = 12, 64  # the sizes of GPT-2 Small, for which the learned values are counted
SIZES = ("heads", "head_dim")  # what every encoding takes before its options
ARGUMENTS = re.compile(r"^Args:\n((?: .*\n?|\n)*)", flags=re.MULTILINE)  # the section of a docstring
ARGUMENT = re.compile(r"^ {4}(\w+): (.*(?:\n {8,}.*)*)", flags=re.MULTILINE)
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# How a gallery of encodings is grouped: by where position acts, and a bias by what it depends on.
GROUPS = {
    "distance": "A bias on the scores, by distance",
    "content": "A bias on the scores, from the tokens",
    "query and key": "Queries and keys, rotated or scaled",
    "embedding": "Added to the token embedding",
    "nowhere": "No position",
}
BY_DISTANCE = ("Toeplitz", "Scaled")  # forms that do not read the tokens


@dataclass(frozen=True)
class Option:
    """One option of an encoding."""

    type: str  # as annotated: int, float | None, "half" | "interleaved"
    default: str  # as written in Python
    meaning: str


@dataclass(frozen=True)
class Card:
    """What there is to know about an encoding before making one, for 12 heads, head_dim 64 and default options.

    Attributes:
        name: Its name in the registry.
        summary: One sentence.
        places: Where it acts: any of "embedding", "query and key" and "score".
        form: The form of its bias, or "none".
        learned_per_head: Learned values, divided by the heads.
        parameters: Shapes of the learned parameters, by name.
        directions: "both", or "causal".
        paper: Where it was published.
        formula: What it computes, in one line.
        options: Type, default and meaning of each option, by name.
        aliases: Other names that it can be asked for by.
    """

    name: str
    summary: str
    places: tuple[str, ...]
    form: str
    learned_per_head: float
    parameters: Mapping[str, tuple[int, ...]]
    directions: str
    paper: str
    formula: str
    options: Mapping[str, Option]
    aliases: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where it acts, as text: "score", "query and key, score", or "nowhere"."""
        return ", ".join(self.places) or "nowhere"

    @property
    def group(self) -> str:
        """Its group in a gallery, one of `GROUPS`: where position acts, and a bias by what it depends on."""
        if "score" in self.places:
            return "distance" if set(self.form.split(" + ")) <= set(BY_DISTANCE) else "content"
        return self.places[0] if self.places else "nowhere"

    @property
    def learned(self) -> str:
        """Learned values per head, as text: "1,538", or "341.3" where heads share a parameter."""
        return f"{self.learned_per_head:,.1f}".removesuffix(".0")

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """The card whose fields were written as JSON."""
        parameters = {name: tuple(shape) for name, shape in entry["parameters"].items()}
        options = {name: Option(**option) for name, option in entry["options"].items()}
        lists = {key: tuple(entry[key]) for key in ("places", "aliases")}
        return cls(**{**entry, **lists, "parameters": parameters, "options": options})


def grouped(cards: Iterable[Card]) -> dict[str, list[Card]]:
    """Cards by the title of their group, in the order of `GROUPS`; groups without cards are left out.

    Example:
        >>> {title: [card.name for card in cards] for title, cards in grouped([relpos.card("rope")]).items()}
        {'Queries and keys, rotated or scaled': ['rope']}
    """
    every = list(cards)
    groups = {title: [card for card in every if card.group == group] for group, title in GROUPS.items()}
    return {title: members for title, members in groups.items() if members}


def compute_card(name: str, cls: type["Encoding"]) -> Card:
    """The card of an encoding class, from an instance with default options."""
    import torch

    with torch.random.fork_rng(devices=[]):  # looking at a card must not change what the caller draws next
        position = cls(HEADS, HEAD_DIM)
    meanings = meanings_of(cls)
    return Card(
        name=name,
        summary=(cls.__doc__ or "").strip().split("\n", 1)[0],
        places=position.places,
        form=position.form,
        learned_per_head=position.learned_per_head,
        parameters={key: tuple(parameter.shape) for key, parameter in position.named_parameters()},
        directions="both" if position.bidirectional else "causal",
        paper=cls.paper,
        formula=cls.formula,
        options={
            key: Option(type_text(option.annotation), repr(option.default), meanings.get(key, ""))
            for key, option in options_of(cls).items()
        },
    )


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
    return {option.name: option for option in parameters if option.kind in NAMED and option.name not in SIZES}


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


def meanings_of(cls: type) -> dict[str, str]:
    """What the docstrings (Google style) of a class and of those it derives from say about each argument."""
    meanings: dict[str, str] = {}
    for documented in reversed(cls.__mro__):
        section = ARGUMENTS.search(inspect.cleandoc(documented.__doc__ or ""))
        for name, meaning in ARGUMENT.findall(section[1] if section else ""):
            meanings[name] = " ".join(meaning.split())
    return meanings
