"""The subjects of the explorer: what was named on the command line."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import Any

from relpos.encodings.registry import card, encoding_class, names
from relpos.explorer import limits
from relpos.explorer.encoding_scenes import EncodingScene, encoding_shows
from relpos.explorer.scenes import Scene
from relpos.explorer.sliders import make_encoding, sliders
from relpos.forms.cards import Card
from relpos.system.errors import unknown

ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})")
LENGTH = 512  # tokens of an encoding without a model, unless another length is asked for


class Subject(ABC):
    """What was named on the command line."""

    def __init__(self, identity: str, name: str) -> None:
        self.id, self.name = identity, name

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """What the page shows of it."""

    @abstractmethod
    def complete(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Check the description of a scene, and fill in what is missing.

        Raises:
            ValueError: An entry is unknown, of another type, or out of range.
        """

    @abstractmethod
    def scene(self, request: Mapping[str, Any]) -> Scene:
        """Make the scene of a completed description."""

    def written(self, scene: Scene, tokens: int) -> dict[str, Any]:
        """The description of the scene in which a model has written on.

        Raises:
            ValueError: It cannot write.
        """
        raise ValueError(f"{self.name} is not a model, and cannot write.")

    def evaluation(self) -> dict[str, Any]:
        """The curves of its evaluations, if there are any."""
        return {"curves": [], "trained_length": None}


class EncodingSubject(Subject):
    """An encoding by name.

    Args:
        identity: Its place on the command line; None for the teacher's pages.
        name: The encoding's name.
        length: Tokens by default.
    """

    def __init__(self, identity: str | None, name: str, length: int | None = None) -> None:
        super().__init__(identity or "", name)
        self.subject, self.length = identity, length or LENGTH

    def as_json(self) -> dict[str, Any]:
        about = encoding_json(self.name)
        position = make_encoding(self.name, limits.HEADS_DEFAULT, limits.HEAD_DIM, {})
        shows = encoding_shows(position)
        default = self.complete({})
        return {
            "id": self.id,
            "name": self.name,
            "kind": "encoding",
            "encoding": self.name,
            "family": None,
            "layers": 1,
            "heads": default["heads"],
            "head_dim": limits.HEAD_DIM,
            "key_heads": default["heads"],
            "causal": True,
            "trained_length": None,
            "shows": list(shows),
            "default_show": shows[0],
            "reads_text": False,
            "can_write": False,
            "documents": [],
            "default": default,
            "evaluation": False,
            "formula": about["formula"],
            "paper": about["paper"],
            "caption": about["summary"],
            "parameters": about["parameters"],
        }

    def complete(self, request: Mapping[str, Any]) -> dict[str, Any]:
        allowed = ("subject", "encoding", "length", "input", "seed", "parameters", "heads", "causal")
        check_entries(request, allowed)
        if request.get("input", {"kind": "none"}) not in ({"kind": "none"}, None):
            raise ValueError(f"{self.name} without a model reads no text: leave the input out.")
        parameters = request.get("parameters", {})
        if not isinstance(parameters, dict):
            raise ValueError("parameters must be an object with one entry per parameter.")
        return {
            "subject": self.subject,
            "encoding": self.name,
            "length": integer("length", request.get("length", self.length), 1, limits.LENGTH),
            "input": {"kind": "none"},
            "seed": integer("seed", request.get("seed", 0), 0, 2**31 - 1),
            "parameters": dict(sorted(parameters.items())),
            "heads": integer("heads", request.get("heads", limits.HEADS_DEFAULT), 1, limits.HEADS),
            "causal": boolean("causal", request.get("causal", True)),
        }

    def scene(self, request: Mapping[str, Any]) -> Scene:
        return EncodingScene(request)


def encoding_json(name: str) -> dict[str, Any]:
    """What a teacher's page shows of an encoding."""
    cls: Any = encoding_class(name)
    return dict(_encoding_json(name, cls))


@cache
def _encoding_json(name: str, cls: Any) -> dict[str, Any]:
    """The same, computed once per class."""
    about: Card = card(name)
    number = ARXIV.search(about.paper)
    return {
        "name": name,
        "summary": about.summary,
        "place": about.place,
        "form": about.form,
        "paper": about.paper,
        "arxiv": number[1] if number else None,
        "formula": about.formula,
        "parameters": [each.as_json() for each in sliders(name, limits.HEADS_DEFAULT, limits.HEAD_DIM)],
        "causal_only": about.directions != "both",
    }


def find_subject(request: Mapping[str, Any], subjects: Mapping[str, Subject]) -> Subject:
    """The subject of a description: one of the command line, or an encoding by name.

    Raises:
        ValueError: There is no such subject.
    """
    identity, name = request.get("subject"), request.get("encoding")
    if identity is not None:
        if not isinstance(identity, str) or identity not in subjects:
            raise ValueError(f"there is no subject {identity!r}: give {', '.join(subjects) or 'none'}."[:300])
        return subjects[identity]
    if not isinstance(name, str) or name not in names():
        raise unknown("encoding", str(name)[:100], names())
    return EncodingSubject(None, name)


def check_entries(request: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    """Refuse entries that a description does not have.

    Raises:
        ValueError: An entry is unknown.
    """
    for entry in request:
        if entry not in allowed:
            raise unknown("entry", str(entry)[:100], allowed)


def integer(name: str, value: Any, low: int, high: int) -> int:
    """An integer within bounds.

    Raises:
        ValueError: It is another thing.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low:,} to {high:,}, not {str(value)[:40]}.")
    return value


def boolean(name: str, value: Any) -> bool:
    """True or False.

    Raises:
        ValueError: It is another thing.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {str(value)[:40]}.")
    return value
