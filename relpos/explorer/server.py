"""Running the explorer: who may ask, a port on this machine, a token if others may reach it, and a clean end."""

import ipaddress
import secrets
import socket
import threading
import time
import webbrowser
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relpos.explorer.explorer import Explorer
from relpos.explorer.routes import ERRORS, ROUTES, Handler
from relpos.explorer.scenes import ExplorerSubject
from relpos.system.memory import limit_arenas

PORT, TRIED = 8123, 20  # the first port, and how many are tried
LOOPBACK = ("localhost", "127.0.0.1", "::1")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
    "connect-src 'self'; worker-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors {ancestors}"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def is_loopback(host: str) -> bool:
    """Whether a host can be reached from this machine only."""
    try:
        return host in LOOPBACK or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Refuses requests of other sites.

    A site whose name was made to point to this machine (DNS rebinding) sends its own name as Host: only loopback names,
    the names of this machine and, if it is reachable from outside, numeric addresses are allowed. Every request must
    carry the token, if there is one. `framed`: a notebook on this machine may show the page in a frame.
    """

    def __init__(self, app: ASGIApp, host: str, token: str | None, framed: bool = False) -> None:
        self.app, self.token = app, token
        self.outside = not is_loopback(host)
        self.hosts = {*LOOPBACK, host.lower()} | ({socket.gethostname().lower()} if self.outside else set())
        ancestors = "'self' http://localhost:* http://127.0.0.1:*" if framed else "'none'"
        self.policy = POLICY.format(ancestors=ancestors)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in {**HEADERS, "Content-Security-Policy": self.policy}.items():
                    headers[name] = value
            await send(message)

        refusal = self.refusal(scope)
        await (refusal or self.app)(scope, receive, send_guarded)

    def refusal(self, scope: Scope) -> Response | None:
        """The reply to a request that may not be answered; None for all others."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._allowed(host):
            return _refuse("this server answers under the names of its own machine only: open the address it printed.")
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in _origins(host):
            return _refuse("a page of another site asked for this: it is refused.")
        if headers.get("sec-fetch-site") == "cross-site" and scope["path"] != "/":
            return _refuse("a page of another site asked for this: it is refused.")
        if self.token is not None and not scope["path"].startswith("/static/"):
            sent = headers.get("x-relpos-token", "")
            if not sent and scope["path"] == "/":
                sent = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
            if not secrets.compare_digest(sent.encode(), self.token.encode()):
                return _refuse("the token is missing or wrong: open the address that relpos explore printed.")
        return None

    def _allowed(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        if name in self.hosts:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.outside or address.is_loopback


def _origins(host: str) -> Iterable[str]:
    return (f"http://{host.lower()}", f"https://{host.lower()}")


def _refuse(sentence: str) -> Response:
    return JSONResponse({"error": sentence}, status_code=403)


def make_app(explorer: Explorer, host: str = "127.0.0.1", token: str | None = None, framed: bool = False) -> Starlette:
    """The application of an explorer behind a `Guard`."""

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

    guard = Middleware(Guard, host=host, token=token, framed=framed)
    app = Starlette(routes=addresses, lifespan=tidied, middleware=[guard], exception_handlers=ERRORS)
    app.state.token_required = token is not None
    return app


def open_port(host: str, port: int | None) -> socket.socket:
    """Listen on a port, PORT if None, any free one if 0; or else on the next that is free."""
    first = PORT if port is None else port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in range(first, min(first + TRIED, 2**16)) if first else [0]:
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, number))
        except OSError as error:
            listening.close()
            if number == first + TRIED - 1 or isinstance(error, socket.gaierror):
                raise OSError(f"cannot listen on {host}, ports {first} to {number}: {error.strerror}.") from None
            if error.errno not in (98, 48, 13):  # in use on Linux and macOS; not allowed
                raise OSError(f"cannot listen on {host}: {error.strerror}. Give another --host.") from None
            continue
        listening.set_inheritable(True)
        return listening
    raise OSError(f"no port from {first} on is free: give another --port.")


class Server:
    """A server of the explorer: on loopback by default; another host makes a token."""

    def __init__(
        self,
        subjects: Sequence[ExplorerSubject],
        host: str = "127.0.0.1",
        port: int | None = None,
        framed: bool = False,
    ) -> None:
        self.token = None if is_loopback(host) else secrets.token_urlsafe(24)
        self.socket = open_port(host, port)
        self.port = int(self.socket.getsockname()[1])
        self.moved = port if port and port != self.port else None  # the port that was asked for and was taken
        shown = "127.0.0.1" if is_loopback(host) else host if host not in ("0.0.0.0", "::") else socket.gethostname()
        self.url = f"http://{f'[{shown}]' if ':' in shown else shown}:{self.port}/"
        self.url += f"?token={self.token}" if self.token else ""
        self.explorer = Explorer(subjects)
        self.explorer.start()  # what the first view needs is computed before the address is known
        app = make_app(self.explorer, host, self.token, framed)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=2,
            limit_concurrency=1000,
            h11_max_incomplete_event_size=64 * 1024,
        )
        self.uvicorn = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    def run(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until interrupted (Ctrl-C); `ready` is called once the port is open."""
        self.explorer.own_process = True
        limit_arenas(2)  # so that what many clients needed is given back when they leave
        if ready is not None:
            ready()
        try:
            self.uvicorn.run(sockets=[self.socket])
        except KeyboardInterrupt:
            pass
        finally:
            self.socket.close()

    def start(self) -> None:
        """Serve in a thread of its own, for a notebook."""
        self._thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self._thread.start()
        while not self.uvicorn.started and self._thread.is_alive():
            time.sleep(0.01)  # a frame that is shown at once would find nothing

    def stop(self) -> None:
        """End the server that `start` began."""
        self.uvicorn.should_exit = True
        if self._thread is not None:
            self._thread.join(timeout=5)
        self.socket.close()

    def open_browser(self) -> None:
        """Show the page in the browser of this machine, without waiting for it."""
        threading.Thread(target=webbrowser.open, args=(self.url,), daemon=True).start()
