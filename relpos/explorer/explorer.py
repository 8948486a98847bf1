"""The state of a server: its subjects, its scenes, and the threads that compute."""

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
from relpos.encodings.registry import names
from relpos.explorer import limits
from relpos.explorer.colour_maps import colour_maps
from relpos.explorer.scenes import Scene, SceneStore
from relpos.explorer.subjects import Subject, encoding_json, find_subject
from relpos.maps.computing import within
from relpos.maps.head_values import difference
from relpos.maps.heads.head_classes import KINDS
from relpos.maps.pyramid import TILE, HeadMap
from relpos.system.memory import give_back_freed_memory

STATIC = Path(__file__).with_name("static")
WORKERS = max(4, min(8, os.cpu_count() or 4))  # computations at a time: each in one thread, and some wait for others
TIDY = 2.0  # seconds between two looks at what is kept
DIFFERENCES = 8  # maps of differences that are kept
Result = TypeVar("Result")
Place = tuple[str, str, int, int]  # scene, show, layer, head


class Explorer:
    """What a server holds.

    Args:
        subjects: What was named on the command line, in order.
        static: The folder of the built page.
    """

    token_required = False
    own_process = False  # whether nothing but the server runs in this process, so that torch's threads are its own

    def __init__(self, subjects: Sequence[Subject], static: Path = STATIC) -> None:
        self.subjects = {subject.id: subject for subject in subjects}
        self.scenes = SceneStore()
        self.static = static
        self.waiting = 0
        self._tidied = time.monotonic()
        self._limiter: anyio.CapacityLimiter | None = None
        self._lock = threading.Lock()
        self._differences: OrderedDict[tuple[Place, Place], HeadMap] = OrderedDict()

    async def compute(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run something in a thread, when one is free.

        Raises:
            HTTPException: Too many requests are waiting.
        """
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(WORKERS)  # belongs to the running event loop
        if self.waiting >= limits.WAITING:
            raise HTTPException(503, "the server is computing for many others: try again in a few seconds.")
        self.waiting += 1
        try:
            return await anyio.to_thread.run_sync(partial(self._limited, work, *arguments), limiter=self._limiter)
        finally:
            self.waiting -= 1

    def _limited(self, work: Callable[..., Result], *arguments: Any) -> Result:
        # One thread each: a tile is small, and threads that wait for one another on a busy machine take far longer.
        if self.own_process and torch.get_num_threads() > 1:
            torch.set_num_threads(1)
        try:
            with within(limits.SECONDS), torch.no_grad():
                return work(*arguments)
        finally:
            if time.monotonic() > self._tidied + TIDY:
                self._tidied = time.monotonic()
                self.scenes.trim()  # maps have grown since their scene was made
                give_back_freed_memory()

    async def tidy_forever(self) -> None:
        """Drop what nobody looks at any more, and give its memory back."""
        while True:
            await anyio.sleep(limits.IDLE / 4)
            await anyio.to_thread.run_sync(self.tidy)

    def tidy(self) -> None:
        """Drop the scenes that nobody has looked at for a while, and give their memory back."""
        self.scenes.drop_idle()
        with self._lock:
            if not len(self.scenes):
                self._differences.clear()
        give_back_freed_memory()

    def subject(self, identity: str) -> Subject:
        """A subject by its place.

        Raises:
            HTTPException: There is none.
        """
        if identity not in self.subjects:
            raise HTTPException(404, f"there is no subject {identity[:40]!r}.")
        return self.subjects[identity]

    def scene(self, name: str) -> Scene:
        """A scene by its hash.

        Raises:
            HTTPException: It is not kept any more.
        """
        scene = self.scenes.get(name)
        if scene is None:
            raise HTTPException(410, "this scene is not kept any more: ask for it again with POST /api/scenes.")
        return scene

    def start(self) -> dict[str, Any]:
        """What the first view needs."""
        return {
            "version": __version__,
            "subjects": [subject.as_json() for subject in self.subjects.values()],
            "encodings": [encoding_json(name) for name in names()],
            "colour_maps": colour_maps(),
            "classes": list(KINDS),
            "limits": {
                "text_bytes": limits.TEXT_BYTES,
                "length": limits.LENGTH,
                "length_of_scores": limits.ENTRY_LENGTH,
                "tile": TILE,
            },
        }

    def make_scene(self, body: Mapping[str, Any]) -> Scene:
        """Make a scene from its description."""
        subject = find_subject(body, self.subjects)
        request = subject.complete(body)
        return self.scenes.make(request, lambda: subject.scene(request))

    def write(self, scene: Scene, tokens: int) -> Scene:
        """The scene in which the model of another scene has written on."""
        return self.make_scene(find_subject(scene.request, self.subjects).written(scene, tokens))

    def difference(self, a: Place, b: Place) -> HeadMap:
        """The map of a difference."""
        with self._lock:
            if (a, b) in self._differences:
                self._differences.move_to_end((a, b))
                return self._differences[a, b]
        made = HeadMap(difference(*(self.scene(place[0]).head_map(*place[1:]).values for place in (a, b))))
        with self._lock:
            self._differences[a, b] = made
            while len(self._differences) > DIFFERENCES:
                self._differences.popitem(last=False)
        return made
