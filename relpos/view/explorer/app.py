"""The web application: routes, and the bounds of every request. What is computed runs in a few threads."""

import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from relpos import __version__
from relpos.encodings.registry import names
from relpos.view.explorer import limits
from relpos.view.explorer.colour_maps import colour_maps
from relpos.view.explorer.guard import Guard
from relpos.view.explorer.head_maps import TILE, HeadMap
from relpos.view.explorer.scenes import Scene, SceneStore
from relpos.view.explorer.subjects import Subject, encoding_json, find_subject
from relpos.view.heads.head_classes import KINDS

STATIC = Path(__file__).with_name("static")
WORKERS = 2  # computations at a time: each may use all of torch's threads
FOREVER = {"Cache-Control": "private, max-age=3600, immutable"}
Result = TypeVar("Result")


class Explorer:
    """The state of a server: its subjects, its scenes, and the threads that compute.

    Args:
        subjects: What was named on the command line, in order.
        static: The folder of the built page.
    """

    def __init__(self, subjects: Sequence[Subject], static: Path = STATIC) -> None:
        self.subjects = {subject.id: subject for subject in subjects}
        self.scenes = SceneStore()
        self.static = static
        self.limiter = anyio.CapacityLimiter(WORKERS)
        self.waiting = 0

    async def compute(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run something in a thread, when one is free.

        Raises:
            HTTPException: Too many requests are waiting.
        """
        if self.waiting >= limits.WAITING:
            raise HTTPException(503, "the server is computing for many others: try again in a few seconds.")
        self.waiting += 1
        try:
            return await anyio.to_thread.run_sync(partial(work, *arguments), limiter=self.limiter)
        finally:
            self.waiting -= 1

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


def make_app(explorer: Explorer, host: str = "127.0.0.1", token: str | None = None, framed: bool = False) -> Starlette:
    """The application of an explorer.

    Args:
        explorer: Its state.
        host: The host that the server listens on.
        token: What every request must carry; None on loopback.
        framed: Whether a notebook on this machine may show the page in a frame.
    """

    def route(path: str, handler: Callable[[Explorer, Request], Awaitable[Response]], method: str = "GET") -> Route:
        async def endpoint(request: Request) -> Response:
            return await handler(explorer, request)

        return Route(path, endpoint, methods=[method])

    scene = "/api/scenes/{scene}"
    routes: list[Route | Mount] = [
        route("/", page),
        route("/api/start", start),
        route("/api/scenes", post_scene, "POST"),
        route(scene + "/tiles/{show}/{layer:int}/{head:int}/{level:int}/{row:int}/{column:int}", tile),
        route(scene + "/row/{show}/{layer:int}/{head:int}/{query:int}", row),
        route(scene + "/value/{show}/{layer:int}/{head:int}/{query:int}/{key:int}", value),
    ]
    with suppress(RuntimeError):
        routes.append(Mount("/static", StaticFiles(directory=explorer.static, follow_symlink=False)))
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, host=host, token=token, framed=framed)],
        exception_handlers={
            HTTPException: _http_error,  # type: ignore[dict-item]
            ValueError: _refused,
            TypeError: _refused,
            Exception: _failed,
        },
    )


async def page(explorer: Explorer, request: Request) -> Response:
    """The page itself."""
    file = explorer.static / "index.html"
    if not file.is_file():
        return HTMLResponse("<p>The page has not been built: run make explorer.</p>", status_code=503)
    return HTMLResponse(file.read_text(encoding="utf-8"), headers={"Cache-Control": "no-cache"})


async def start(explorer: Explorer, request: Request) -> Response:
    """GET /api/start."""
    return Json(await explorer.compute(explorer.start))


async def post_scene(explorer: Explorer, request: Request) -> Response:
    """POST /api/scenes."""
    body = await read_json_body(request)
    scene = await explorer.compute(explorer.make_scene, body)
    return Json(scene.as_json())


async def tile(explorer: Explorer, request: Request) -> Response:
    """GET one tile."""
    here = request.path_params
    place = (here["level"], here["row"], here["column"])
    data = await explorer.compute(lambda: tile_bytes(_head_map(explorer, request), *place))
    return Response(data, media_type="application/octet-stream", headers=FOREVER)


async def row(explorer: Explorer, request: Request) -> Response:
    """GET all values of a query."""
    query = request.path_params["query"]
    step, (low, mean, high) = await explorer.compute(lambda: _head_map(explorer, request).row(query))
    return Json({"query": query, "first": 0, "step": step, "mean": mean, "low": low, "high": high})


async def value(explorer: Explorer, request: Request) -> Response:
    """GET one value."""
    here = request.path_params
    number = await explorer.compute(lambda: _head_map(explorer, request).value(here["query"], here["key"]))
    return Json({"value": number})


def _head_map(explorer: Explorer, request: Request) -> HeadMap:
    here = request.path_params
    scene = explorer.scene(here["scene"])
    return scene.head_map(here["show"], here["layer"], here["head"])


def tile_bytes(head_map: HeadMap, level: int, row: int, column: int) -> bytes:
    """A tile as float32, little-endian."""
    return bytes(head_map.tile(level, row, column).contiguous().numpy().astype("<f4", copy=False).tobytes())


class Json(JSONResponse):
    """JSON in which tensors are lists, and what is not finite is null."""

    def render(self, content: Any) -> bytes:
        return json.dumps(plain(content), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def plain(value: Any) -> Any:
    """A value as JSON has it: tensors and arrays as lists, NaN and infinities as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


async def read_json_body(request: Request) -> dict[str, Any]:
    """The body of a request, which is an object.

    Raises:
        HTTPException: It is too long, or another kind of data.
    """
    if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
        raise HTTPException(415, "the body must be JSON: send Content-Type: application/json.")
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > limits.BODY_BYTES:
            raise HTTPException(413, f"the request has more than {limits.BODY_BYTES:,} bytes: shorten the text.")
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise HTTPException(400, "the body must be a JSON object.")
    return body


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a number that JSON has.")


async def _http_error(request: Request, error: HTTPException) -> Response:
    return JSONResponse({"error": error.detail}, status_code=error.status_code)


async def _refused(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)[:1000]}, status_code=400)


async def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the server could not compute this; its terminal says why."}, status_code=500)
