"""What there is to know about an encoding before making one: its card, computed from its class.

Computing a card needs torch. The cards of the encodings in this folder are therefore kept as JSON in the user's cache
folder, so that `relpos ls` is fast; their file is named after a hash of this folder's sources.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.forms.options import meanings_of, options_of, summary_of, type_text
from relpos.system.files import cache_folder, write_text

if TYPE_CHECKING:
    from relpos.forms.encoding import Encoding

HEADS, HEAD_DIM = 12, 64  # the sizes of GPT-2 Small, for which the learned values are counted


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
    """

    name: str
    summary: str
    places: tuple[str, ...]  # where it acts: any of embedding, query and key, score
    form: str  # the form of its bias, or "none"
    learned_per_head: float
    parameters: Mapping[str, tuple[int, ...]]  # name: shape
    directions: str  # "both", or "causal"
    paper: str
    formula: str
    options: Mapping[str, Option]

    @property
    def place(self) -> str:
        """Where it acts, as text: "score", "query and key, score", or "nowhere"."""
        return ", ".join(self.places) or "nowhere"

    @property
    def learned(self) -> str:
        """Learned values per head, as text: "1,538", or "341.3" where heads share a parameter."""
        return f"{self.learned_per_head:,.1f}".removesuffix(".0")


def compute_card(name: str, cls: type["Encoding"]) -> Card:
    """Compute the card of an encoding class from an instance with default options.

    Returns:
        The card.
    """
    import torch

    with torch.random.fork_rng(devices=[]):  # looking at a card must not change what the caller draws next
        position = cls(HEADS, HEAD_DIM)
    meanings = meanings_of(cls)
    return Card(
        name=name,
        summary=summary_of(cls),
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


def cache_file() -> Path | None:
    """The file for the cards of this version of the sources; None if there are no sources or no cache folder."""
    package = Path(__file__).parents[1]
    sources = sorted([*package.glob("forms/*.py"), *package.glob("encodings/*.py")])
    try:
        key = hashlib.sha256(b"\0".join(file.name.encode() + b"\0" + file.read_bytes() for file in sources))
        return cache_folder() / "cards" / f"{key.hexdigest()[:16]}.json" if sources else None
    except (OSError, RuntimeError):  # RuntimeError: the user has no home folder
        return None


def read_cards() -> dict[str, Card] | None:
    """The cards in the cache, or None if they are missing or unreadable."""
    file = cache_file()
    try:
        entries = json.loads(file.read_text(encoding="utf-8")) if file else None
        return None if entries is None else {name: _card(entry) for name, entry in entries.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_cards(cards: Mapping[str, Card]) -> None:
    """Put the cards into the cache, unless it cannot be written."""
    file = cache_file()
    if file is None:
        return
    entries = {name: dataclasses.asdict(card) for name, card in cards.items()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(entries, ensure_ascii=False, indent=1))
    except OSError:
        return  # the cards are computed again next time


def _card(entry: Mapping[str, Any]) -> Card:
    parameters = {name: tuple(shape) for name, shape in entry["parameters"].items()}
    options = {name: Option(**option) for name, option in entry["options"].items()}
    return Card(**{**entry, "places": tuple(entry["places"]), "parameters": parameters, "options": options})
