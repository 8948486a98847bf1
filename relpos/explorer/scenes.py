"""A scene: a subject with its parameters on an input at a length. Scenes are kept by a hash of their description."""

import hashlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from relpos.explorer import limits
from relpos.maps.layer import Layer
from relpos.maps.pyramid import HeadMap
from relpos.maps.values import HeadValues
from relpos.system.errors import unknown

Result = TypeVar("Result")


class Scene(ABC):
    """What can be looked at: the map of every layer and head.

    Attributes:
        request: The completed description; the same description gives the same scene.
        length: Number of tokens.
        depth: Number of layers.
        heads: Heads per layer.
        causal: Whether a query sees only keys up to its own position.
        shows: Kinds of values that it has.
        default_show: The first to be shown.
        static: Whether the default values are the same for every input.
        caption: What it is, in words.
        used: When it was last asked for, by time.monotonic.
        notes: Sentences on how it differs from what was asked for.
        tokens: The text of each token; None if there is no text.
    """

    request: dict[str, Any]
    length: int
    depth: int
    heads: int
    causal: bool
    shows: tuple[str, ...]
    default_show: str
    static: bool
    caption: str
    notes: list[str]
    tokens: list[str] | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.used = time.monotonic()
        self._maps: OrderedDict[tuple[str, int, int], HeadMap] = OrderedDict()
        self._measured: dict[Any, Any] = {}

    @abstractmethod
    def layer(self, show: str, number: int) -> Layer:
        """A layer of which `show` can be read; 1 is the first.

        Raises:
            ValueError: The layer has no such values.
        """

    @abstractmethod
    def values(self, show: str, number: int, head: int) -> HeadValues:
        """The values of a head; layers and heads are counted from 1."""

    def head_map(self, show: str, number: int, head: int) -> HeadMap:
        """The map of a head.

        Raises:
            ValueError: There are no such values, layer or head.
        """
        self.check_show(show)
        for kind, place, last in (("layer", number, self.depth), ("head", head, self.heads)):
            if not 1 <= place <= last:
                raise ValueError(f"there is no {kind} {place}: give a number from 1 to {last}.")
        key = (show, number, head)
        with self._lock:
            if key in self._maps:
                self._maps.move_to_end(key)
                return self._maps[key]
        made = HeadMap(self.values(show, number, head))
        with self._lock:
            return self._maps.setdefault(key, made)

    def measured(self, key: Any, compute: Callable[[], Result]) -> Result:
        """What was measured before, or is measured now: small results that several requests need."""
        with self._lock:
            if key in self._measured:
                return self._measured[key]  # type: ignore[no-any-return]
        result = compute()
        with self._lock:
            return self._measured.setdefault(key, result)  # type: ignore[no-any-return]

    def check_show(self, show: str) -> None:
        """Refuse a kind of values that the scene does not have.

        Raises:
            ValueError: It has no such values.
        """
        if show not in self.shows:
            raise unknown("kind of values", show[:40], self.shows)

    def forget_maps(self, most: int) -> None:
        """Drop the maps that were not looked at for the longest time, until the others have at most so many bytes."""
        with self._lock:
            while self._maps and sum(each.nbytes for each in self._maps.values()) > most:
                self._maps.popitem(last=False)

    @property
    def map_bytes(self) -> int:
        """Bytes of its maps."""
        with self._lock:
            return sum(each.nbytes for each in self._maps.values())

    @property
    @abstractmethod
    def layer_bytes(self) -> int:
        """Bytes of its layers."""

    def as_json(self) -> dict[str, Any]:
        """The reply to a request for a scene."""
        return {
            "scene": scene_hash(self.request),
            "request": self.request,
            "length": self.length,
            "layers": self.depth,
            "heads": self.heads,
            "causal": self.causal,
            "shows": list(self.shows),
            "default_show": self.default_show,
            "static": self.static,
            "has_tokens": self.tokens is not None,
            "caption": self.caption,
            "notes": self.notes,
            **self.measures(),
        }

    def measures(self) -> dict[str, Any]:
        """Uniformity and context dependence by layer and head, where they are known without work."""
        return {"uniformity": None, "context_dependence": None}


def scene_hash(request: Mapping[str, Any]) -> str:
    """The name of a scene: a hash of its completed description."""
    written = json.dumps(request, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(written.encode()).hexdigest()[:32]


class SceneStore:
    """The scenes that the server has: those that were used last, within a number of bytes.

    Args:
        most_bytes: Of all scenes together, with their maps.
        most: Scenes.
    """

    def __init__(self, most_bytes: int = limits.SCENE_BYTES, most: int = limits.SCENES) -> None:
        self.most_bytes, self.most = most_bytes, most
        self._lock = threading.Lock()
        self._scenes: OrderedDict[str, Scene] = OrderedDict()
        self._making: dict[str, threading.Lock] = {}

    def get(self, name: str) -> Scene | None:
        """A scene by its hash; None if it was dropped, or never made."""
        with self._lock:
            scene = self._scenes.get(name)
            if scene is not None:
                self._scenes.move_to_end(name)
                scene.used = time.monotonic()
            return scene

    def make(self, request: Mapping[str, Any], compute: Callable[[], Scene]) -> Scene:
        """The scene of a completed description: the one that is kept, or a new one, which is made once."""
        name = scene_hash(request)
        with self._lock:
            making = self._making.setdefault(name, threading.Lock())
        with making:
            scene = self.get(name)
            if scene is None:
                scene = compute()
                with self._lock:
                    self._scenes[name] = scene
                self.trim()
        with self._lock:
            self._making.pop(name, None)
        return scene

    def drop_idle(self, seconds: float = limits.IDLE) -> None:
        """Drop the scenes that nobody has looked at for so long: who comes back makes them again."""
        with self._lock:
            for name, scene in list(self._scenes.items()):
                if time.monotonic() - scene.used > seconds:
                    del self._scenes[name]

    def trim(self) -> None:
        """Drop maps and scenes beyond what may be kept; the newest scene stays."""
        with self._lock:
            scenes = list(self._scenes.items())
            total = 0
            for place, (name, scene) in enumerate(reversed(scenes)):
                used = scene.layer_bytes
                if place and (place >= self.most or total + used > self.most_bytes):
                    del self._scenes[name]
                    continue
                scene.forget_maps(max(0, (self.most_bytes - total - used) // 2))
                total += used + scene.map_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all scenes."""
        with self._lock:
            return sum(scene.layer_bytes + scene.map_bytes for scene in self._scenes.values())

    def __len__(self) -> int:
        return len(self._scenes)
