"""What each address answers. The work itself runs in the explorer's threads."""

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse

from relpos.explorer import limits
from relpos.explorer.details import head_details, ranges
from relpos.explorer.explorer import Explorer
from relpos.explorer.overview import layer_overview, other_layers
from relpos.explorer.pictures import Region, check_region, draw_region, write_csv
from relpos.explorer.replies import Json, plain, read_json_body
from relpos.explorer.subjects import integer
from relpos.maps.pyramid import HeadMap

FOREVER = {"Cache-Control": "private, max-age=3600, immutable"}
MEDIA = {"png": "image/png", "svg": "image/svg+xml", "csv": "text/csv; charset=utf-8"}


async def page(explorer: Explorer, request: Request) -> Response:
    """GET /: the page itself."""
    file = explorer.static / "index.html"
    if not file.is_file():
        return HTMLResponse("<p>The page has not been built: run make explorer.</p>", status_code=503)
    text = file.read_text(encoding="utf-8")
    if explorer.token_required:
        text = text.replace('"token_required":false', '"token_required":true')
    return HTMLResponse(text, headers={"Cache-Control": "no-cache"})


async def start(explorer: Explorer, request: Request) -> Response:
    """GET /api/start."""
    return Json(await explorer.compute(explorer.start))


async def post_scene(explorer: Explorer, request: Request) -> Response:
    """POST /api/scenes."""
    body = await read_json_body(request)
    return Json(await explorer.compute(lambda: explorer.make_scene(body).as_json()))


async def overview(explorer: Explorer, request: Request) -> Response:
    """GET the overview: one line of JSON per layer, as it is ready."""
    scene = explorer.scene(request.path_params["scene"])
    show = request.query_params.get("show", scene.default_show)
    first, last = _layers(request.query_params.get("layers"), scene.depth)
    scene.check_show(show)

    async def lines() -> AsyncIterator[bytes]:
        second = await explorer.compute(other_layers, scene, show)
        for number in range(first, last + 1):
            line: dict[str, Any]
            try:
                other = None if second is None else second[number - 1]
                line = await explorer.compute(layer_overview, scene, show, number, other)
            except ValueError as error:  # a layer without such values
                line = {"layer": number, "heads": [], "error": str(error)}
            yield json.dumps(plain(line), allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"
            explorer.scenes.trim()

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def _layers(given: str | None, depth: int) -> tuple[int, int]:
    first, _, last = (given or f"1-{depth}")[:20].partition("-")
    last = last or first
    if not first.isdecimal() or not last.isdecimal() or not 1 <= int(first) <= int(last) <= depth:
        raise ValueError(f"there are no layers {str(given)[:20]}: give a number, or two as in 1-{depth}.")
    return int(first), int(last)


async def head(explorer: Explorer, request: Request) -> Response:
    """GET the details of one head."""
    here = request.path_params
    scene = explorer.scene(here["scene"])
    show = request.query_params.get("show", scene.default_show)
    with_mass = request.query_params.get("mass") != "0"
    return Json(await explorer.compute(head_details, scene, show, here["layer"], here["head"], with_mass))


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


async def tokens(explorer: Explorer, request: Request) -> Response:
    """GET the text of some tokens."""
    scene = explorer.scene(request.path_params["scene"])
    if scene.tokens is None:
        raise ValueError("this scene has no text.")
    first = integer("first", _number(request.query_params.get("first", "0")), 0, limits.LENGTH)
    count = integer("count", _number(request.query_params.get("count", "2000")), 1, limits.LENGTH)
    return Json({"first": first, "tokens": scene.tokens[first : first + count], "total": len(scene.tokens)})


async def write(explorer: Explorer, request: Request) -> Response:
    """POST: the model writes on."""
    body = await read_json_body(request)
    count = integer("tokens", body.get("tokens", 16), 1, limits.WRITTEN)
    scene = explorer.scene(request.path_params["scene"])
    longer = await explorer.compute(lambda: explorer.write(scene, count).as_json())
    return Json({**longer, "from": scene.length})


async def difference_tile(explorer: Explorer, request: Request) -> Response:
    """GET one tile of a difference."""
    here = request.path_params
    place = (here["level"], here["row"], here["column"])
    data = await explorer.compute(lambda: tile_bytes(_difference(explorer, request), *place))
    return Response(data, media_type="application/octet-stream", headers=FOREVER)


async def difference_head(explorer: Explorer, request: Request) -> Response:
    """GET the range of a difference."""
    return Json(await explorer.compute(lambda: ranges(_difference(explorer, request), "difference")))


async def evaluation(explorer: Explorer, request: Request) -> Response:
    """GET the curves of a subject's evaluations."""
    subject = explorer.subject(request.path_params["subject"])
    return Json(await explorer.compute(subject.evaluation))


async def export(explorer: Explorer, request: Request) -> Response:
    """GET what is shown as a file."""
    here, query = request.path_params, request.query_params
    scene = explorer.scene(here["scene"])
    show, suffix = query.get("show", scene.default_show), here["suffix"]
    scene.check_show(show)
    if suffix not in MEDIA:
        raise ValueError(f"a picture is a {', '.join(MEDIA)} file, not {suffix[:20]}.")
    last = scene.length - 1
    bounds = {"first_query": 0, "last_query": last, "first_key": 0, "last_key": last}
    region = check_region(
        Region(**{name: _number(query.get(name) or str(bound)) for name, bound in bounds.items()}), scene.length
    )

    def work() -> bytes:
        if suffix == "csv":
            return write_csv(scene, show, here["layer"], here["head"], region)
        sink = query.get("without_sink", "") in ("1", "true")
        return draw_region(scene, show, here["layer"], here["head"], region, sink, f".{suffix}")

    name = f"relpos-{show}-layer{here['layer']}-head{here['head']}.{suffix}"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(await explorer.compute(work), media_type=MEDIA[suffix], headers=headers)


def _number(text: str) -> int:
    if not text.isdecimal() or len(text) > 12:
        raise ValueError(f"{text[:20]!r} is not a position: give an integer from 0 on.")
    return int(text)


def _head_map(explorer: Explorer, request: Request) -> HeadMap:
    here = request.path_params
    return explorer.scene(here["scene"]).head_map(here["show"], here["layer"], here["head"])


def _difference(explorer: Explorer, request: Request) -> HeadMap:
    here = request.path_params
    a, b = ((here[f"scene_{side}"], here["show"], here[f"layer_{side}"], here[f"head_{side}"]) for side in ("a", "b"))
    return explorer.difference(a, b)


def tile_bytes(head_map: HeadMap, level: int, row: int, column: int) -> bytes:
    """A tile as float32, little-endian."""
    return bytes(head_map.tile(level, row, column).contiguous().numpy().astype("<f4", copy=False).tobytes())
