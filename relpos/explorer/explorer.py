"""The state of a server: its subjects, the scenes that it keeps, and the threads that compute."""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import torch
from starlette.exceptions import HTTPException

from relpos import __version__
from relpos.encodings.registry import card, names
from relpos.explorer import explore_options as options
from relpos.explorer import replies
from relpos.explorer.scenes import ExplorerSubject, Scene, encoding_json, scene_hash
from relpos.explorer.stories import examples, read_stories
from relpos.forms.cards import grouped
from relpos.maps.head_classes import KINDS
from relpos.maps.head_values import difference
from relpos.maps.map import HeadMap
from relpos.maps.subject import EncodingSubject
from relpos.maps.values import Work, within
from relpos.pictures.colours import hex_colours
from relpos.system.errors import unknown
from relpos.system.memory import give_back_freed_memory

STATIC = Path(__file__).with_name("static")
WORKERS = max(4, min(8, os.cpu_count() or 4))  # computations at a time: each in one thread, and some wait for others
TIDY = 2.0  # seconds between two looks at what is kept
DIFFERENCES = 8  # maps of differences that are kept
Result = TypeVar("Result")
Place = tuple[str, str, int, int]  # scene, show, layer, head


class SceneStore:
    """The scenes that the server has: those that were used last, within a number of bytes."""

    def __init__(self, most_bytes: int = options.SCENE_BYTES, most: int = options.SCENES) -> None:
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

    def drop_idle(self, seconds: float = options.IDLE) -> None:
        """Drop the scenes that nobody has looked at for this long: they are recomputed on demand."""
        with self._lock:
            for name, scene in list(self._scenes.items()):
                if time.monotonic() - scene.used > seconds:
                    del self._scenes[name]

    def trim(self) -> None:
        """Drop maps and scenes beyond what may be kept; the newest scene stays."""
        with self._lock:
            total = 0
            for place, (name, scene) in enumerate(reversed(list(self._scenes.items()))):
                used = scene.view.nbytes
                if place and (place >= self.most or total + used > self.most_bytes):
                    del self._scenes[name]
                    continue
                scene.forget_maps(max(0, (self.most_bytes - total - used) // 2))
                total += used + scene.map_bytes

    def __len__(self) -> int:
        return len(self._scenes)


class Explorer:
    """What a server holds: the subjects that were named, in order, and their scenes."""

    own_process = False  # whether nothing but the server runs in this process, so that torch's threads are its own

    def __init__(self, subjects: Sequence[ExplorerSubject], static: Path = STATIC) -> None:
        self.subjects = {str(subject.id): subject for subject in subjects}
        self.tasks: dict[str, Work] = {}  # that run, by the name that the page gave them
        self.static = static  # the folder of the built page
        self.scenes = SceneStore()
        self.waiting = 0
        self._tidied = time.monotonic()
        self._limiter: anyio.CapacityLimiter | None = None
        self._lock = threading.Lock()
        self._differences: OrderedDict[tuple[Place, Place], HeadMap] = OrderedDict()

    async def compute(self, work: Callable[..., Result], *arguments: Any, task: str | None = None) -> Result:
        """Run something in a thread, when one is free. Under the name of a task it can be followed and cancelled."""
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(WORKERS)  # belongs to the running event loop
        if self.waiting >= options.WAITING:
            raise HTTPException(503, "the server is computing for many others: try again in a few seconds.")
        self.waiting += 1
        running = Work(0.0)
        if task is not None:
            self.tasks[task] = running
        try:
            return await anyio.to_thread.run_sync(
                partial(self._limited, running, work, *arguments), limiter=self._limiter
            )
        finally:
            self.waiting -= 1
            if task is not None and self.tasks.get(task) is running:
                del self.tasks[task]

    def _limited(self, running: Work, work: Callable[..., Result], *arguments: Any) -> Result:
        # One thread each: a tile is small, and threads that wait for one another on a busy machine take far longer.
        if self.own_process and torch.get_num_threads() > 1:
            torch.set_num_threads(1)
        try:
            with within(options.SECONDS, running), torch.no_grad():
                return work(*arguments)
        finally:
            if time.monotonic() > self._tidied + TIDY:
                self._tidied = time.monotonic()
                self.scenes.trim()  # maps have grown since their scene was made
                give_back_freed_memory()

    async def tidy_forever(self) -> None:
        """Drop the scenes that nobody has looked at for a while, and give their memory back."""
        while True:
            await anyio.sleep(options.IDLE / 4)
            await anyio.to_thread.run_sync(self.tidy)

    def tidy(self) -> None:
        self.scenes.drop_idle()
        with self._lock:
            if not len(self.scenes):
                self._differences.clear()
        give_back_freed_memory()

    def scene(self, name: str) -> Scene:
        """A scene by its hash."""
        scene = self.scenes.get(name)
        if scene is None:
            raise HTTPException(410, "this scene is not kept any more: ask for it again with POST /api/scenes.")
        return scene

    def start(self) -> replies.Start:
        """What the first view needs."""
        return {
            "version": __version__,
            "subjects": [subject.as_json() for subject in self.subjects.values()],
            "examples": [subject.as_json() for subject in examples().values()],
            "encodings": [encoding_json(name) for name in names()],
            "groups": [
                {"title": title, "names": [entry.name for entry in cards]}
                for title, cards in grouped(map(card, names())).items()
            ],
            "stories": read_stories(),
            "colour_maps": hex_colours(),
            "classes": list(KINDS),
        }

    def subject_of(self, request: Mapping[str, Any]) -> ExplorerSubject:
        """The subject of a description: one of the command line, or an encoding by name."""
        identity, name = request.get("subject"), request.get("encoding")
        if identity is not None:
            known = {**examples(), **self.subjects}
            if not isinstance(identity, str) or identity not in known:
                raise ValueError(f"there is no subject {identity!r}: give {', '.join(self.subjects) or 'none'}."[:300])
            return known[identity]
        if not isinstance(name, str) or name not in names():
            raise unknown("encoding", str(name)[:100], names())
        return ExplorerSubject(None, EncodingSubject(name))

    def make_scene(self, body: Mapping[str, Any]) -> Scene:
        """Make a scene from its description."""
        subject = self.subject_of(body)
        request = subject.complete(body)
        return self.scenes.make(request, lambda: subject.scene(request))

    def write(self, scene: Scene, tokens: int) -> Scene:
        """The scene in which the model of another scene has written on."""
        return self.make_scene(self.subject_of(scene.request).written(scene, tokens))

    def difference(self, a: Place, b: Place) -> HeadMap:
        """The map of a difference."""
        with self._lock:
            if (a, b) in self._differences:
                self._differences.move_to_end((a, b))
                return self._differences[a, b]
        head_map = HeadMap(difference(*(self.scene(place[0]).head_map(*place[1:]).values for place in (a, b))))
        with self._lock:
            self._differences[a, b] = head_map
            while len(self._differences) > DIFFERENCES:
                self._differences.popitem(last=False)
        return head_map
