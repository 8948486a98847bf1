"""Who may ask: the Host and Origin of every request, the token, and the headers of every reply."""

import ipaddress
import secrets
import socket
from collections.abc import Iterable
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
    the names of this machine and, if it is reachable from outside, numeric addresses are allowed.

    Args:
        app: What is guarded.
        host: The host that the server listens on.
        token: What every request must carry; None on loopback.
        framed: Whether a notebook on this machine may show the page in a frame.
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
