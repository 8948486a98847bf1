"""The web application: its addresses, and what happens to errors."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from relpos.explorer import routes
from relpos.explorer.explorer import Explorer
from relpos.explorer.guard import Guard

Handler = Callable[[Explorer, Request], Awaitable[Response]]
SCENE, HEAD = "/api/scenes/{scene}", "{layer:int}/{head:int}"
BOTH = "{show}/{layer_a:int}/{head_a:int}/{layer_b:int}/{head_b:int}"
PLACE = "{level:int}/{row:int}/{column:int}"
ROUTES: dict[tuple[str, str], Handler] = {
    ("GET", "/"): routes.page,
    ("GET", "/api/start"): routes.start,
    ("POST", "/api/scenes"): routes.post_scene,
    ("GET", f"{SCENE}/overview"): routes.overview,
    ("GET", f"{SCENE}/head/{HEAD}"): routes.head,
    ("GET", f"{SCENE}/tiles/{{show}}/{HEAD}/{PLACE}"): routes.tile,
    ("GET", f"{SCENE}/row/{{show}}/{HEAD}/{{query:int}}"): routes.row,
    ("GET", f"{SCENE}/value/{{show}}/{HEAD}/{{query:int}}/{{key:int}}"): routes.value,
    ("GET", f"{SCENE}/tokens"): routes.tokens,
    ("POST", f"{SCENE}/write"): routes.write,
    ("GET", f"{SCENE}/export/{HEAD}.{{suffix}}"): routes.export,
    ("GET", f"/api/difference/{{scene_a}}/{{scene_b}}/tiles/{BOTH}/{PLACE}"): routes.difference_tile,
    ("GET", f"/api/difference/{{scene_a}}/{{scene_b}}/head/{BOTH}"): routes.difference_head,
    ("GET", "/api/subjects/{subject}/evaluation"): routes.evaluation,
}


def make_app(explorer: Explorer, host: str = "127.0.0.1", token: str | None = None, framed: bool = False) -> Starlette:
    """The application of an explorer.

    Args:
        explorer: Its state.
        host: The host that the server listens on.
        token: What every request must carry; None on loopback.
        framed: Whether a notebook on this machine may show the page in a frame.
    """
    explorer.token_required = token is not None

    def route(method: str, path: str, handler: Handler) -> Route:
        async def endpoint(request: Request) -> Response:
            return await handler(explorer, request)

        return Route(path, endpoint, methods=[method])

    addresses: list[Route | Mount] = [route(*address, handler) for address, handler in ROUTES.items()]
    if explorer.static.is_dir():
        addresses.append(Mount("/static", StaticFiles(directory=explorer.static, follow_symlink=False)))

    @asynccontextmanager
    async def tidied(app: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(explorer.tidy_forever)
            yield
            tasks.cancel_scope.cancel()

    return Starlette(
        routes=addresses,
        lifespan=tidied,
        middleware=[Middleware(Guard, host=host, token=token, framed=framed)],
        exception_handlers={
            HTTPException: _http_error,
            ClientDisconnect: _left,
            ValueError: _refused,
            TypeError: _refused,
            TimeoutError: _slow,
            Exception: _failed,
        },
    )


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, status_code=error.status_code)


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it: the client left while it was sending, which is no failure


async def _refused(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)[:1000]}, status_code=400)


async def _slow(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=503)


async def _failed(request: Request, error: Exception) -> Response:
    logging.getLogger("relpos").error("%s %s failed: %r", request.method, request.url.path, error)
    return JSONResponse({"error": "the server could not compute this; its terminal says why."}, status_code=500)
