"""What each address answers, and what happens to errors. The work itself runs in the explorer's threads."""

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from relpos.encodings.registry import names
from relpos.explorer import explore_options as options
from relpos.explorer.explorer import Explorer
from relpos.explorer.exports import Region
from relpos.explorer.gallery_entries import gallery_entry
from relpos.explorer.measures import difference_ranges, head_details, layer_overview, other_layers
from relpos.explorer.replies import MOST_SIDE, SIDE, LayerSummary, to_json
from relpos.explorer.scenes import integer
from relpos.maps.map import HeadMap
from relpos.maps.values import CancelledError

FOREVER = {"Cache-Control": "private, max-age=3600, immutable"}
MEDIA = {"png": "image/png", "svg": "image/svg+xml", "csv": "text/csv; charset=utf-8"}
SCENE, HEAD = "/api/scenes/{scene}", "{layer:int}/{head:int}"
BOTH = "{show}/{layer_a:int}/{head_a:int}/{layer_b:int}/{head_b:int}"
PLACE = "{level:int}/{row:int}/{column:int}"


class Json(JSONResponse):
    """JSON in which what is not finite is null."""

    def render(self, content: Any) -> bytes:
        return to_json(content)


async def page(explorer: Explorer, request: Request) -> Response:
    """The page itself."""
    file = explorer.static / "index.html"
    if not file.is_file():
        return HTMLResponse("<p>The page has not been built: run make explorer.</p>", status_code=503)
    text = file.read_text(encoding="utf-8")
    if request.app.state.token_required:
        text = text.replace('"token_required":false', '"token_required":true')
    return HTMLResponse(text, headers={"Cache-Control": "no-cache"})


async def post_scene(explorer: Explorer, request: Request) -> Response:
    """Make a scene."""
    body = await read_json_body(request)
    return Json(await explorer.compute(lambda: explorer.make_scene(body).as_json(), task=_task(request)))


async def write(explorer: Explorer, request: Request) -> Response:
    """The model writes on."""
    body = await read_json_body(request)
    count = integer("tokens", body.get("tokens", 16), 1, options.WRITTEN)
    scene = explorer.scene(request.path_params["scene"])
    longer = await explorer.compute(lambda: explorer.write(scene, count).as_json())
    return Json({**longer, "from": scene.length})


async def overview(explorer: Explorer, request: Request) -> Response:
    """One line of JSON per layer, as it is ready."""
    scene = explorer.scene(request.path_params["scene"])
    show = scene.check_show(request.query_params.get("show", scene.default_show))
    layers = request.query_params.get("layers", f"1-{scene.depth}")[:20]
    first, _, last = layers.partition("-")
    last = last or first
    side = integer("side", _number(request.query_params.get("side", str(SIDE))), 8, MOST_SIDE)
    if not first.isdecimal() or not last.isdecimal() or not 1 <= int(first) <= int(last) <= scene.depth:
        raise ValueError(f"there are no layers {layers}: give a number, or two as in 1-{scene.depth}.")

    async def lines() -> AsyncIterator[bytes]:
        others = await explorer.compute(other_layers, scene, show)
        for number in range(int(first), int(last) + 1):
            line: LayerSummary
            try:
                line = await explorer.compute(layer_overview, scene, show, number, others, side)
            except ValueError as error:  # a layer without such values
                line = {"layer": number, "heads": [], "error": str(error)}
            yield to_json(line) + b"\n"
            explorer.scenes.trim()

    return StreamingResponse(lines(), media_type="application/x-ndjson")


async def gallery(explorer: Explorer, request: Request) -> Response:
    """One line of JSON per encoding, as it is ready."""

    async def lines() -> AsyncIterator[bytes]:
        for name in names():
            yield to_json(await explorer.compute(gallery_entry, name)) + b"\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


async def progress(explorer: Explorer, request: Request) -> Response:
    """How far a task is."""
    running = explorer.tasks.get(request.path_params["task"])
    return Json({"done": None if running is None else running.done})


async def cancel(explorer: Explorer, request: Request) -> Response:
    """End a task: nobody waits for it any more."""
    running = explorer.tasks.get(request.path_params["task"])
    if running is not None:
        running.cancelled = True
    return Json({"done": None})


def _task(request: Request) -> str | None:
    """The name that the page gave to its request."""
    return request.headers.get("x-relpos-task", "")[:64] or None


Parameters = Mapping[str, Any]  # of the path
Query = Mapping[str, str]


def head(explorer: Explorer, here: Parameters, query: Query) -> Response:
    """The details of one head."""
    scene = explorer.scene(here["scene"])
    show = query.get("show", scene.default_show)
    with_mass, plain = query.get("mass") != "0", query.get("colours") == "plain"
    return Json(head_details(scene, show, here["layer"], here["head"], with_mass, plain))


def tile(explorer: Explorer, here: Parameters, query: Query) -> Response:
    """A tile of a map or of a difference as float32, little-endian."""
    values = _head_map(explorer, here).tile(here["level"], here["row"], here["column"])
    data = values.contiguous().numpy().astype("<f4", copy=False).tobytes()
    return Response(data, media_type="application/octet-stream", headers=FOREVER)


def row(explorer: Explorer, here: Parameters, query: Query) -> Response:
    """All values of a query."""
    step, (low, mean, high) = _head_map(explorer, here).row(here["query"])
    return Json({"query": here["query"], "first": 0, "step": step, "mean": mean, "low": low, "high": high})


def tokens(explorer: Explorer, here: Parameters, query: Query) -> Response:
    """The text of some tokens."""
    texts = explorer.scene(here["scene"]).view.tokens
    if texts is None:
        raise ValueError("this scene has no text.")
    first = integer("first", _number(query.get("first", "0")), 0, options.LONGEST)
    count = integer("count", _number(query.get("count", "2000")), 1, options.LONGEST)
    return Json({"first": first, "tokens": texts[first : first + count], "total": len(texts)})


def evaluation(explorer: Explorer, here: Parameters, query: Query) -> Response:
    """The curves of a subject's evaluations."""
    if here["subject"] not in explorer.subjects:
        raise HTTPException(404, f"there is no subject {here['subject'][:40]!r}.")
    return Json(explorer.subjects[here["subject"]].evaluation())


def export(explorer: Explorer, here: Parameters, query: Query) -> Response:
    """What is shown as a file."""
    scene, suffix = explorer.scene(here["scene"]), here["suffix"]
    show = scene.check_show(query.get("show", scene.default_show))
    if suffix not in MEDIA:
        raise ValueError(f"a picture is a {', '.join(MEDIA)} file, not {suffix[:20]}.")
    bounds = {"first_query": 0, "last_query": scene.length - 1, "first_key": 0, "last_key": scene.length - 1}
    places = {name: _number(query.get(name) or str(bound)) for name, bound in bounds.items()}
    region = Region(scene, show, here["layer"], here["head"], **places)
    without_sink = query.get("without_sink", "") in ("1", "true")
    data = region.table() if suffix == "csv" else region.picture(without_sink, f".{suffix}")
    name = f"relpos-{show}-layer{here['layer']}-head{here['head']}.{suffix}"
    return Response(data, media_type=MEDIA[suffix], headers={"Content-Disposition": f'attachment; filename="{name}"'})


def _number(text: str) -> int:
    if not text.isdecimal() or len(text) > 12:
        raise ValueError(f"{text[:20]!r} is not a position: give an integer from 0 on.")
    return int(text)


def _head_map(explorer: Explorer, here: Parameters) -> HeadMap:
    """The map of a head, or of the difference of two."""
    if "scene" in here:
        return explorer.scene(here["scene"]).head_map(here["show"], here["layer"], here["head"])
    a, b = ((here[f"scene_{side}"], here["show"], here[f"layer_{side}"], here[f"head_{side}"]) for side in ("a", "b"))
    return explorer.difference(a, b)


Handler = Callable[[Explorer, Request], Awaitable[Response]]
HANDLED: dict[tuple[str, str], Handler] = {
    ("GET", "/"): page,
    ("POST", "/api/scenes"): post_scene,
    ("POST", f"{SCENE}/write"): write,
    ("GET", f"{SCENE}/overview"): overview,
    ("GET", "/api/gallery"): gallery,
    ("GET", "/api/tasks/{task}"): progress,
    ("POST", "/api/tasks/{task}/cancel"): cancel,
}
COMPUTED: dict[str, Callable[[Explorer, Parameters, Query], Response]] = {  # in the explorer's threads
    "/api/start": lambda explorer, here, query: Json(explorer.start()),
    f"{SCENE}/head/{HEAD}": head,
    f"{SCENE}/tiles/{{show}}/{HEAD}/{PLACE}": tile,
    f"{SCENE}/row/{{show}}/{HEAD}/{{query:int}}": row,
    f"{SCENE}/value/{{show}}/{HEAD}/{{query:int}}/{{key:int}}": lambda explorer, here, query: Json(
        {"value": _head_map(explorer, here).value(here["query"], here["key"])}
    ),
    f"{SCENE}/tokens": tokens,
    f"{SCENE}/export/{HEAD}.{{suffix}}": export,
    f"/api/difference/{{scene_a}}/{{scene_b}}/tiles/{BOTH}/{PLACE}": tile,
    f"/api/difference/{{scene_a}}/{{scene_b}}/head/{BOTH}": lambda explorer, here, query: Json(
        difference_ranges(_head_map(explorer, here))
    ),
    "/api/subjects/{subject}/evaluation": evaluation,
}


def computed(handler: Callable[[Explorer, Parameters, Query], Response]) -> Handler:
    """A handler that runs in one of the explorer's threads."""

    async def compute(explorer: Explorer, request: Request) -> Response:
        return await explorer.compute(handler, explorer, request.path_params, request.query_params, task=_task(request))

    return compute


ROUTES: dict[tuple[str, str], Handler] = {
    **HANDLED,
    **{("GET", path): computed(handler) for path, handler in COMPUTED.items()},
}


async def read_json_body(request: Request) -> dict[str, Any]:
    """The body of a request, which is an object."""
    if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
        raise HTTPException(415, "the body must be JSON: send Content-Type: application/json.")
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > options.BODY_BYTES:
            raise HTTPException(413, f"the request has more than {options.BODY_BYTES:,} bytes: shorten the text.")
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise HTTPException(400, "the body must be a JSON object.")
    return body


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a number that JSON has.")


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, status_code=error.status_code)
    status = 503 if isinstance(error, TimeoutError) else 400
    return JSONResponse({"error": str(error)[:1000]}, status_code=status)


async def _cancelled(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "cancelled."}, status_code=409)


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it: the client left while it was sending, which is not a failure


async def _failed(request: Request, error: Exception) -> Response:
    logging.getLogger("relpos").error("%s %s failed: %r", request.method, request.url.path, error)
    return JSONResponse({"error": "the server could not compute this; its terminal says why."}, status_code=500)


ERRORS = {
    **dict.fromkeys((HTTPException, ValueError, TypeError, TimeoutError), _refused),
    ClientDisconnect: _left,
    CancelledError: _cancelled,
    Exception: _failed,
}
